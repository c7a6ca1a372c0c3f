"""Which vLLM the tests run on: the suite's, or with `make test-vllm` another."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from connector.vllm.contract import Release, release_of

__all__ = ["IS_SUITES_OWN", "RELEASE", "vllm_version"]


def vllm_version() -> str:
    """The installed one's, read from its files: importing it takes ten seconds, and no engine runs in this process."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    found = re.search(r"^__version__ = .*'(.*)'", (Path(spec.origin).parent / "_version.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


RELEASE: Release = release_of(vllm_version()) or (0, 0)

IS_SUITES_OWN = RELEASE == (0, 32)
"""How much of a prompt an engine keeps itself, and so offers us, differs between releases: numbers are of this one."""
