"""Formats sizes so that the settings can read them back."""

from __future__ import annotations

from kvstore.runtime.sizes import format_bytes as size

__all__ = ["size"]
