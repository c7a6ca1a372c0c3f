"""Lets a method of ours fail once on one rank of an engine. Named as a worker's extension, which each rank has."""

from __future__ import annotations

import importlib
from typing import Any


class WorkerExtension:
    """Adds what a test calls by `collective_rpc`."""

    rank: int

    def break_once(self, rank: int, module: str, name: str, method: str, error: str) -> None:
        """Let the next call of a method raise on a rank.

        Args:
            rank: The one.
            module: Where the method's class is.
            name: The class.
            method: Its method.
            error: The name of a class in `kvstore.errors`, or of one that is built in.
        """
        if self.rank != rank:
            return
        owner = getattr(importlib.import_module(module), name)
        whole = getattr(owner, method)
        errors, built_in = importlib.import_module("kvstore.errors"), importlib.import_module("builtins")
        raised = getattr(errors, error, None) or getattr(built_in, error)

        def broken(*_: Any, **__: Any) -> None:
            setattr(owner, method, whole)
            raise raised("broken by a test")

        setattr(owner, method, broken)
