"""Lines of the store's client in an engine: they stand among vLLM's."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from connector.logs import join_vllm_logs


class Lines(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def vllm_lines() -> Iterator[Lines]:
    """As in an engine: vLLM's logger has a handler."""
    vllm, client, lines = logging.getLogger("vllm"), logging.getLogger("kvstore"), Lines()
    level, parent = vllm.level, client.parent
    vllm.addHandler(lines)
    vllm.setLevel(logging.INFO)
    yield lines
    vllm.removeHandler(lines)
    vllm.setLevel(level)
    client.parent = parent
    client.setLevel(logging.NOTSET)


def test_they_go_where_vllms_go(vllm_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its handlers and level: also the line that an outage is over, which is no warning."""
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest has some during a test
    log = logging.getLogger("kvstore.client.pool")
    assert not log.isEnabledFor(logging.INFO)
    join_vllm_logs()
    log.info("the kvstore service is reachable")
    log.debug("not this one")
    assert vllm_lines.texts == ["the kvstore service is reachable"]


def test_handlers_of_their_own_are_used(vllm_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's logging configuration names them."""
    own = Lines()
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("kvstore"), "handlers", [own])
    join_vllm_logs()
    logging.getLogger("kvstore.client.pool").warning("the kvstore service does not answer")
    assert (own.texts, vllm_lines.texts) == (["the kvstore service does not answer"], [])
