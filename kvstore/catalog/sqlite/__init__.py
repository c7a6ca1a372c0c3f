"""One node's catalog and pending writes in SQLite files beside the records."""
