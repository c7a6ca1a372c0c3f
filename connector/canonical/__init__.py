"""Which byte of a GPU block is which byte of a canonical page. See README.md."""
