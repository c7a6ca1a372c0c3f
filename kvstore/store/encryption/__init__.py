"""Records of a tenant are stored under its keys."""
