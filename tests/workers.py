"""How the suite is shared out to the workers of pytest-xdist."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

__all__ = ["EnginesInTurn", "comes_last"]

_ENGINES = "tests/connector/"
_EXACTNESS = "tests/connector/test_exactness.py"


class EnginesInTurn(LoadScopeScheduling):
    """Tests of engines run in one worker, one after the other; all others file by file, wherever there is room.

    Two of them at once would share the processors, and the memory, that each counts on. The exception is the matrix of
    exactness, which counts on neither: it is handed out last, to whichever worker is free first. (Marks of groups,
    xdist's own way, are lost with pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "engines" if file.startswith(_ENGINES) and file != _EXACTNESS else file


def comes_last(nodeid: str) -> bool:
    """Whether a test runs after those for which this is false. Work is handed out in the order of collection."""
    return nodeid.startswith(_EXACTNESS)
