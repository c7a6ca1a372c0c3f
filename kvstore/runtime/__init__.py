"""Small tools every layer stands on: time, task ownership, single flight, byte budgets, meters. See README.md."""
