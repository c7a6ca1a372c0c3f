"""The index of the shared tiers: sizes and use of every boundary. See README.md."""
