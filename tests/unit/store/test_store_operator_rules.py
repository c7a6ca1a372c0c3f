"""What operators order is followed: by the store that was told, by others that share the book, after a loss."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.api import Ack, Outcome, SaveOutcome
from kvstore.catalog.coordination import OPERATOR_RULES, FileTextStore
from kvstore.compose import open_store
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.eviction.holdings import Quota
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.instruments import Instruments
from kvstore.settings import load_settings
from kvstore.store.retention.operator_rules import OperatorRules
from kvstore.testing.prompts import ATTENTION, Prompt, describe
from kvstore.testing.waiting import soon, until


def rules_of(folder: Path, quotas: Mapping[str, Quota] | None = None) -> OperatorRules:
    return rules_in(FileTextStore(folder, OPERATOR_RULES), quotas or {})


def rules_in(book: FileTextStore, quotas: Mapping[str, Quota]) -> OperatorRules:
    return OperatorRules(book, quotas, Instruments())


def described(weights_id: str, tenant: str = "red") -> NamespaceDescription:
    return describe(ATTENTION, "m", tenant, weights_id)


async def test_weights_are_retired_for_one_tenant_or_all(tmp_path: Path) -> None:
    """Whoever shares the book follows; other weights and other tenants are left alone; it can be taken back."""
    told, other = rules_of(tmp_path), rules_of(tmp_path)
    asked = (("red", "old"), ("red", "new"), ("blue", "old"))
    await told.retire("red", "old", is_retired=True, deadline=soon())
    assert not other.are_retired("red", "old")
    await other.read(soon())
    assert [other.are_retired(*one) for one in asked] == [True, False, False]
    await told.retire(None, "old", is_retired=True, deadline=soon())
    await told.retire("red", "old", is_retired=False, deadline=soon())
    await other.read(soon())
    assert [other.are_retired(*one) for one in asked] == [True, False, True]
    await told.retire(None, "old", is_retired=False, deadline=soon())
    await other.read(soon())
    assert not any(other.are_retired(*one) for one in asked)


async def test_an_order_stands_over_the_settings(tmp_path: Path) -> None:
    """A tenant's quota is the ordered one until that is withdrawn; too large guarantees are refused, and what nobody
    here can hold is refused too.
    """
    rules = rules_of(tmp_path, {"red": Quota(100, 200), "blue": Quota(0, 50)})
    with pytest.raises(InvalidRequest, match="applies no quotas"):
        await rules.set_quota("red", Quota(1, 2), deadline=soon())
    held: list[Mapping[str, Quota]] = []
    rules.apply_to(held.append, 1000)
    await rules.set_quota("red", Quota(300, 400), deadline=soon())
    await rules.set_quota("green", Quota(700), deadline=soon())
    with pytest.raises(InvalidRequest, match="three quarters"):
        await rules.set_quota("blue", Quota(1), deadline=soon())
    await rules.set_quota("red", None, deadline=soon())
    assert [one.get("red") for one in held] == [Quota(100, 200), Quota(300, 400), Quota(300, 400), Quota(100, 200)]
    assert held[-1] == {"red": Quota(100, 200), "blue": Quota(0, 50), "green": Quota(700)}
    assert dict(rules.ordered) == {"green": Quota(700)}


async def test_quotas_that_are_set_at_a_time_guarantee_no_more_than_there_is(tmp_path: Path) -> None:
    """Each fits alone, and both are checked before either is written."""
    rules = rules_of(tmp_path)
    rules.apply_to(lambda _: None, 1000)
    both = (rules.set_quota(tenant, Quota(600), deadline=soon()) for tenant in ("red", "blue"))
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert first is None and isinstance(second, InvalidRequest)
    assert sum(quota.guaranteed_bytes for quota in rules.quotas.values()) == 600


async def test_what_the_book_lost_is_told_again(tmp_path: Path) -> None:
    """The file is gone, as a Redis after FLUSHALL: whoever remembers tells it, and what cannot be read changes
    nothing.
    """
    path = tmp_path / "orders.json"
    rules = rules_of(tmp_path)
    await rules.retire(None, "old", is_retired=True, deadline=soon())
    path.unlink()
    await rules.read(soon())
    fresh = rules_of(tmp_path)
    await fresh.read(soon())
    assert fresh.are_retired("red", "old")
    path.write_text("[")
    with pytest.raises(Unavailable):
        await rules.read(soon())
    assert rules.are_retired("red", "old")
    later = '["later kind", "x"]'
    path.write_text(f'{{"{later.replace(chr(34), chr(92) + chr(34))}": "?"}}')
    await rules.read(soon())
    assert rules.are_retired("red", "old")


async def test_retired_weights_serve_nothing(tmp_path: Path) -> None:
    """Lookups miss, stages bring nothing, leases end, saves are refused, and the reason is told; after a restart too.
    Nothing is deleted: taken back, all is there.
    """
    settings = load_settings({"memory_bytes": "16MiB", "disk_bytes": "64MiB", "cold": f"file://{tmp_path / 'r'}"})
    prompt = Prompt(ATTENTION, "a", 128, tenant="red", weights_id="old")
    async with open_store(settings) as store:
        await store.open_namespace(prompt.description, deadline=soon())
        for record in prompt.records():
            await store.save(record, ack=Ack.COLD, deadline=soon())
        staged = await store.stage(prompt.query(), deadline=soon())
        assert staged.resume_tokens == 128 and staged.lease is not None
        assert store.operations.operator_rules is not None
        await store.operations.operator_rules.retire("red", "old", is_retired=True, deadline=soon())
        assert (await store.lookup(prompt.query(), deadline=soon())).resume_tokens == 0
        again = await store.stage(prompt.query(), deadline=soon())
        assert (again.lease, again.resume_tokens, again.cut) == (None, 0, "weights_retired")
        with pytest.raises(Unavailable):
            await store.load(staged.lease, staged.keys[0], deadline=soon())
        assert await store.save(prompt.record(64), deadline=soon()) is SaveOutcome.FULL
        told = Outcome("r", prompt.namespace, 128, 128, 0, 0, "nothing_stored", stop=prompt.boundary(64), tenant="red")
        store.report(told)
        explained = await store.explain("r", tenant="red", deadline=soon())
        assert explained["reason"] == "weights_retired" and "kvstore weights" in str(explained["advice"])
    async with open_store(settings) as store:
        await store.open_namespace(prompt.description, deadline=soon())
        assert (await store.lookup(prompt.query(), deadline=soon())).resume_tokens == 0
        assert store.operations.operator_rules is not None
        await store.operations.operator_rules.retire("red", "old", is_retired=False, deadline=soon())
        assert (await store.lookup(prompt.query(), deadline=soon())).resume_tokens == 128


async def test_a_book_that_takes_nothing_back_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A book that all services share has lost an order, and is too full to take it again: what others have ordered is
    followed at once, and the lost order is written when there is room."""
    monkeypatch.setattr(FileTextStore, "is_shared", True)
    path = tmp_path / "orders.json"
    book = FileTextStore(tmp_path, OPERATOR_RULES)
    instruments = Instruments()
    told, other = OperatorRules(book, {}, instruments, poll_s=0.01), rules_in(book, {})
    await told.start()
    await told.retire("red", "old", is_retired=True, deadline=soon())
    book.kind = replace(OPERATOR_RULES, texts_max=1)
    path.write_text(json.dumps({'["retired", "red", "oldest"]': '{"is_retired": true, "at_s": 1}'}))
    await until(lambda: instruments.meters.get("catalog_failures", call="orders"))
    assert told.are_retired("red", "oldest") and told.are_retired("red", "old")
    book.kind = OPERATOR_RULES
    await other.retire("red", "older", is_retired=True, deadline=soon())
    await until(lambda: told.are_retired("red", "older"))
    assert told.are_retired("red", "old")
    await told.aclose()


FOREIGN_RULES = {
    "[" * 2000 + "]" * 2000: "{}",
    '["quota", "deep"]': "[" * 2000 + "]" * 2000,
    '["quota", "text"]': '{"quota": ["much", "more"]}',
    '["quota", "part"]': '{"quota": [1.5, null]}',
    '["quota", "many"]': '{"quota": [1, 2, 3]}',
    '["quota", "list"]': "[1]",
    '["quota"]': '{"quota": [1, 2]}',
    '["retired", "red", "late"]': '{"is_retired": true, "at_s": 1e999}',
    '["retired", {}, "whose"]': '{"is_retired": true, "at_s": 1}',
    '"retired"': '{"is_retired": true, "at_s": 1}',
}


async def test_texts_that_are_no_rules_are_passed_over(tmp_path: Path) -> None:
    """Of a later release, or damaged: a service starts with them, follows all others, and keeps them."""
    good = {'["quota", "red"]': '{"quota": [1, 2]}', '["retired", null, "old"]': '{"is_retired": true, "at_s": 1}'}
    path = tmp_path / "orders.json"
    path.write_text(json.dumps({**FOREIGN_RULES, **good}))
    rules = rules_of(tmp_path)
    await rules.start()
    assert rules.quotas == {"red": Quota(1, 2)}
    assert rules.retired.keys() == {(None, "old")}
    await rules.retire("red", "older", is_retired=True, deadline=soon())
    assert json.loads(path.read_text()).keys() > FOREIGN_RULES.keys()
    await rules.aclose()
