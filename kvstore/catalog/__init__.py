"""What is stored where, how large and how used. See README.md."""
