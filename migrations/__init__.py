"""Versioned changes of what is stored: pure steps, and a runner that may be killed at any moment."""
