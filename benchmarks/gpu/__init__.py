"""The GPU kit: what the connector does on a GPU, checked and measured on a bare machine. See README.md."""
