"""The catalog, pending writes, leases and books in a Redis that services share."""
