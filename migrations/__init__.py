"""Versioned changes of what is stored. What is stored today is the first version, so that there is none yet."""
