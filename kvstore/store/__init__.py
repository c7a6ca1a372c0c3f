"""The node's store: memory, hot and cold tier behind one `PageStore`. See README.md."""
