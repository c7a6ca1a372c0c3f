"""Records on their way to the slower tiers."""
