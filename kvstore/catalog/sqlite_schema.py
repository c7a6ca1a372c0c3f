"""The tables of the catalog's SQLite file."""

from __future__ import annotations

__all__ = ["SCHEMA", "VERSION"]

SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
  namespace BLOB, prefix BLOB, data BLOB NOT NULL, PRIMARY KEY (namespace, prefix)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (
  namespace BLOB, level INTEGER, boundaries INTEGER, records INTEGER, bytes INTEGER, PRIMARY KEY (namespace, level)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS namespaces (namespace BLOB PRIMARY KEY, tenant TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tombstones (
  number INTEGER PRIMARY KEY, namespace BLOB, prefix BLOB, level INTEGER, "group" INTEGER, slice INTEGER,
  bytes INTEGER, reason INTEGER, at_s INTEGER
);
"""
VERSION = 1
"""A file of another version is renamed and replaced."""
