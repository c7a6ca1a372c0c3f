"""Lets LMCache run beside vLLM 0.32 on a CPU; an engine imports it before vLLM.

LMCache imports numba. vLLM then looks at all attributes of all modules for Triton kernels, and numba's library of LLVM
answers every name with a function, `__dict__` too.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import ffi  # type: ignore[import-untyped]

_any_name = ffi._lib_wrapper.__getattr__


def _no_special_name(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _any_name(self, name)


ffi._lib_wrapper.__getattr__ = _no_special_name
