"""Small tools that every layer uses: time, task ownership, single flight, byte budgets, meters. See README.md."""
