"""Finds what is wrong with a set-up, and how to fix it. See README.md."""
