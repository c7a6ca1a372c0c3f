"""What adapts vLLM: which of its names we use, its objects as plain values, and the connector that it calls."""
