"""Which prefixes to keep: policies, admission rules and budgets, all pure. Reading order: the README."""
