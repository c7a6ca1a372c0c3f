"""What the scheduler side tells the store of requests that have ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

from connector.request_parameters import RequestFlags
from connector.vllm.connector import KVStoreConnector
from kvstore.model.prompt_hint import EndedPrompt, Wishes
from kvstore.testing.waiting import eventually
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness


def listen(made: SchedulerHarness, patch: pytest.MonkeyPatch) -> list[EndedPrompt]:
    """The prompts that are reported from now on."""
    told: list[EndedPrompt] = []
    patch.setattr(made.store, "end_prompt", told.append)
    return told


def test_a_request_that_ends_is_reported_with_its_wishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages' ends, what comes after the last page, and what its client said."""
    with harness(tmp_path) as made:
        told = listen(made, monkeypatch)
        page, wishes = made.shape.layout.page_tokens, Wishes(retain_s=30.0, session="s")
        state = made.new("r", 2 * page + 40, flags=RequestFlags(wishes=wishes))
        made.ask("r")
        made.hashed("r")
        chain = state.chain
        assert chain is not None
        made.side.on_finished("r", 2 * page + 40, [tuple(range(1, 200))])
        eventually(lambda: bool(told))
        (one,) = told
        assert (one.request, one.namespace, one.wishes) == ("r", made.side.namespace.id, wishes)
        assert (one.prompt_tokens, one.step_tokens) == (2 * page + 40, made.shape.boundary_tokens)
        ends = [boundary.tokens for boundary in one.boundaries]
        assert ends == [page, 2 * page, 2 * page + 16, 2 * page + 32]
        assert [boundary.prefix for boundary in one.boundaries] == [
            state.prefix_at(tokens, made.shape.boundary_tokens) for tokens in ends
        ]


def test_what_cannot_be_cached_or_did_not_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an aborted request the prompt is reported; of one that cannot be cached nothing is."""
    with harness(tmp_path) as made:
        told = listen(made, monkeypatch)
        made.new("plain", 64, uncacheable="embeddings")
        made.side.on_finished("plain", 64, [(1, 2, 3, 4)])
        made.new("aborted", 64, flags=RequestFlags(wishes=Wishes(release=True)))
        made.ask("aborted")
        made.hashed("aborted")
        made.side.on_finished("aborted")
        eventually(lambda: bool(told))
        assert [(one.request, one.boundaries[-1].tokens) for one in told] == [("aborted", 64)]


@pytest.mark.parametrize("status", [status for status in RequestStatus if status.name.startswith("FINISHED_")])
def test_the_rest_of_an_answer_is_final_if_it_is_whole(status: RequestStatus) -> None:
    """All of it but its last token, which was never computed; of a request that was aborted or failed nothing."""
    transfer = SimpleNamespace(kv_connector_extra_config={"mode": "off"}, kv_role="kv_both")
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    connector = KVStoreConnector(config, KVConnectorRole.SCHEDULER, None)
    ended = list[int]()
    side: Any = SimpleNamespace(
        requests={}, on_finished=lambda request, final_tokens, tables: ended.append(final_tokens)
    )
    connector.scheduler_side = side
    asked = SimpleNamespace(request_id="r", status=status, num_computed_tokens=64, num_tokens=64)
    assert connector.request_finished_all_groups(asked, ((1, 2),)) == (False, None)
    whole = status.name.removeprefix("FINISHED_") in ("STOPPED", "LENGTH_CAPPED", "REPETITION")
    assert (ended, connector.guarded_errors) == ([63 if whole else 0], 0)
