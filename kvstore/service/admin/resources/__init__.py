"""The routes of the administration, a file for each group. See README.md."""
