"""Imported in an engine before it starts: notes when the parts of a load begin and end. See timeline.py.

It wraps methods of the connector and its client, each once. A mark costs a microsecond or two.
"""

from __future__ import annotations

import functools
import inspect
import resource
import time
from typing import Any

from connector.device.cpu import CpuCopier
from connector.device.gpu import StreamCopier
from connector.prefix_hash import PrefixChain
from connector.scheduler.side import SchedulerSide
from connector.worker import loader
from connector.worker.loader import Loader
from connector.worker.side import WorkerSide
from kvstore.client.remote import RemoteStore

__all__ = ["take"]

_MARKS: list[tuple[str, float, float, int]] = []
"""Name, begin and end in seconds of the monotonic clock, page faults of this process so far."""


def take() -> list[tuple[str, float, float, int]]:
    """All marks since the last call."""
    marks = list(_MARKS)
    _MARKS.clear()
    return marks


def _note(name: str, begin_s: float, end_s: float) -> None:
    _MARKS.append((name, begin_s, end_s, resource.getrusage(resource.RUSAGE_SELF).ru_minflt))


def _wrap(owner: Any, method: str, name: str) -> None:
    """Replace a function by one that notes each of its calls."""
    inner = getattr(owner, method)
    if inspect.iscoroutinefunction(inner):

        @functools.wraps(inner)
        async def noted_later(*arguments: Any, **named: Any) -> Any:
            begin_s = time.monotonic()
            try:
                return await inner(*arguments, **named)
            finally:
                _note(name, begin_s, time.monotonic())

        setattr(owner, method, noted_later)
        return

    @functools.wraps(inner)
    def noted(*arguments: Any, **named: Any) -> Any:
        begin_s = time.monotonic()
        try:
            return inner(*arguments, **named)
        finally:
            _note(name, begin_s, time.monotonic())

    setattr(owner, method, noted)


def _wrap_steps() -> None:
    """Note a step that computes, from the moment its jobs are bound until its results are collected."""
    begin_step, take_results, on_new_request = (
        WorkerSide.begin_step,
        WorkerSide.take_results,
        SchedulerSide.on_new_request,
    )
    began_s, computes = 0.0, True

    def begin(side: WorkerSide, jobs: Any) -> None:
        nonlocal began_s, computes
        began_s, computes = time.monotonic(), jobs.computes
        begin_step(side, jobs)

    def take_and_note(side: WorkerSide, *, may_wait: bool = False) -> tuple[set[str], set[str]]:
        finished, failed = take_results(side, may_wait=may_wait)
        now_s = time.monotonic()
        if computes:
            _note("forward", began_s, now_s)
        if finished:
            _note("noticed", now_s, now_s)
        return finished, failed

    def arrive(side: SchedulerSide, prompt: Any) -> None:
        now_s = time.monotonic()
        _note("arrived", now_s, now_s)
        on_new_request(side, prompt)

    for owner, method, marked in (
        (WorkerSide, "begin_step", begin),
        (WorkerSide, "take_results", take_and_note),
        (SchedulerSide, "on_new_request", arrive),
    ):
        setattr(owner, method, marked)


for _owner, _method, _name in (
    (PrefixChain, "extend", "hash"),
    (RemoteStore, "lookup", "lookup"),
    (RemoteStore, "stage", "stage"),
    (RemoteStore, "load_many", "locate"),
    (Loader, "load", "order"),
    (CpuCopier, "scatter_all", "scatter"),
    (StreamCopier, "scatter_all", "scatter"),
    (loader, "verify_payload", "verify"),
    (loader, "decode_into", "decode"),
    (Loader, "_report", "loaded"),
):
    _wrap(_owner, _method, _name)
_wrap_steps()
