"""Records as files under one directory, owned by one process. See README.md."""

from kvstore.tiers.filesystem.tier import FilesystemTier

__all__ = ["FilesystemTier"]
