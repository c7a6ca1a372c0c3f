"""What the store is for, shown on real engines; `python -m demo`. See README.md."""
