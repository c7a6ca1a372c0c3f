"""What the cold tier gets and what leaves it."""
