"""How the suite is shared out to the workers of pytest-xdist."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

__all__ = ["EnginesInOneWorker"]


class EnginesInOneWorker(LoadScopeScheduling):
    """Tests of engines run in one worker, one after the other; all others file by file, wherever there is room.

    Two of them at once would share the processors, and the memory, that each counts on. (Marks of groups, xdist's own
    way, are lost with pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return "engines" if nodeid.startswith("tests/connector/") else nodeid.split("::", 1)[0]
