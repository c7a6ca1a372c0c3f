"""What operators run on a store."""
