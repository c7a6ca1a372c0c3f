"""Versioned changes of stored records: pure steps, and a runner that may be killed at any moment."""
