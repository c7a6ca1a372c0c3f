"""The scheduler side: what to look up, fetch, load and save; no torch, no waiting. See README.md."""
