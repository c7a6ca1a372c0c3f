"""What operators run on a store, and what keeps its catalog complete."""
