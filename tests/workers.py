"""How the suite is divided among the workers of pytest-xdist."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

__all__ = ["EnginesInTurn", "comes_last"]

_ENGINES = "tests/connector/"
_EXACTNESS = "tests/connector/test_exactness.py"


class EnginesInTurn(LoadScopeScheduling):
    """Runs the tests of engines in one worker, one after the other, and all other tests file by file in any worker.

    Two tests of engines at once would share the processors and the memory that each needs. The matrix of exactness
    needs neither: its tests are handed out last, to any free worker, those of one model runner together: for each of
    the two another process has to import vLLM. pytest-xdist's own marks of groups are lost with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        if file == _EXACTNESS:
            return f"{file}-v2" if "-v2" in nodeid else file
        return "engines" if file.startswith(_ENGINES) else file


def comes_last(nodeid: str) -> bool:
    """Whether a test runs after those for which this is false. Work is handed out in the order of collection."""
    return nodeid.startswith(_EXACTNESS)
