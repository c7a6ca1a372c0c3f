"""The SGLang side: a storage backend of its HiCache. See README.md."""
