"""The administration interface: REST for operators and tenants, on a thread of its own. See README.md."""
