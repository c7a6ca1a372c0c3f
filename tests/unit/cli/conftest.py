"""The command line beside what it asks, which is in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstore.cli.main import main

Run = Callable[..., Coroutine[Any, Any, tuple[int, str, str]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command beside the service, in a thread: status, output and complaints."""

    async def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = await asyncio.to_thread(main, arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return call
