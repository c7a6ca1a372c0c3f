"""Maps the bytes of GPU blocks to the bytes of canonical pages: pure integers, proven before use. See README.md."""
