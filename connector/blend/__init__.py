"""Reuses the keys and values of documents wherever they stand in a prompt: approximate, off by default."""
