"""Long operations of the administration: how they run, and what they do. See README.md."""
