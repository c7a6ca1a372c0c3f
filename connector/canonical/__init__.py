"""Which byte of a GPU block is which byte of a canonical page: pure integers, proven before use. See README.md."""
