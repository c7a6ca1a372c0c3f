"""How fast the store is, beside the ceilings of the machine it runs on. See README.md."""
