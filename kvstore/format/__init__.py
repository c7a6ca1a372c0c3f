"""Stored formats: the record header, sealing and opening, names, manifests. Frozen once released. See docs/formats/."""
