"""Quotas and retired weights over HTTP: who may set them, and who sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.service.admin import catalog_access
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon
from tests.unit.admin.service_harness import ServiceHarness, ended, open_service, prompt_of


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[ServiceHarness]:
    async with open_service(tmp_path, quotas="red=1MiB:2MiB", disk_bytes="256MiB") as opened:
        yield opened


async def test_quotas_are_set_shown_and_withdrawn(made: ServiceHarness) -> None:
    """An operator's quota overrides the settings at once; each tenant sees its own."""
    await made.save(prompt_of("a", "red"))
    async with made.client("operator") as client, made.client("red") as red, made.client("blue") as blue:
        (told,) = (await client.get("/v1/quotas")).json()["quotas"]
        assert told == {
            "tenant": "red",
            "guaranteed_bytes": 1 << 20,
            "maximum_bytes": 2 << 20,
            "is_ordered": False,
            "used_bytes": told["used_bytes"],
            "is_known": True,
        }
        assert told["used_bytes"] > 0
        wanted = {"guaranteed_bytes": 3 << 20, "maximum_bytes": 4 << 20}
        answer = (await client.put("/v1/quotas/red", json=wanted)).json()
        assert answer == {**told, **wanted, "is_ordered": True} == (await red.get("/v1/quotas/red")).json()
        assert (await client.put("/v1/quotas/a/b%20c", json=wanted)).status_code == 422
        as_json = {"content-type": "application/json"}
        for body in ("1" * 5000, '{"maximum_bytes": 5, "maximum_bytes": 6}', "[" * 100_000, b'{"\xff": 1}'):
            wrong = await client.put("/v1/quotas/red", content=body, headers=as_json)
            assert wrong.status_code == 422 and wrong.json()["field"].startswith("body") and wrong.json()["expected"]
        assert (await client.put("/v1/quotas/blue/sky", json={"maximum_bytes": 5.0})).json()["is_known"] is False
        assert [one["tenant"] for one in (await client.get("/v1/quotas")).json()["quotas"]] == ["blue/sky", "red"]
        assert (await red.get("/v1/quotas")).json()["quotas"] == [answer]
        assert (await blue.get("/v1/quotas")).json()["quotas"] == []
        assert (await blue.get("/v1/quotas/red")).status_code == 404
        for body, field in (
            ({"guaranteed_bytes": 5, "maximum_bytes": 4}, "body.maximum_bytes"),
            ({"maximum_bytes": 0}, "body.maximum_bytes"),
            ({"guaranteed_bytes": -1}, "body.guaranteed_bytes"),
            ({"guaranteed_bytes": 1 << 40}, "guaranteed_bytes"),
        ):
            refused = await client.put("/v1/quotas/red", json=body)
            assert (refused.status_code, refused.json()["field"]) == (422, field)
        assert (await client.delete("/v1/quotas/red")).status_code == 204
        assert (await client.get("/v1/quotas/red")).json() == told
        assert (await client.delete("/v1/quotas/red")).status_code == 204
        assert (await client.delete("/v1/quotas/blue/sky")).status_code == 204
        assert (await client.get("/v1/quotas/blue/sky")).status_code == 404


async def test_weights_are_listed_retired_and_restored(made: ServiceHarness) -> None:
    """A tenant retires its own weights, after a dry run. An operator's retirement holds for all tenants, and a tenant
    cannot undo it.
    """
    prompts = {
        (tenant, weights): await made.save(Prompt(ATTENTION, "a", 128, tenant=tenant, weights_id=weights))
        for tenant in ("red", "blue")
        for weights in ("old", "new")
    }
    await made.save(prompt_of("without"))

    async def hits() -> dict[tuple[str, str], int]:
        return {
            place: (await made.store.lookup(prompt.query(), deadline=soon())).resume_tokens
            for place, prompt in prompts.items()
        }

    query = {"weights_id": "old", "confirm": "true"}
    async with made.client("operator") as operator, made.client("red") as red, made.client("blue") as blue:
        listed = (await red.get("/v1/weights")).json()
        assert [(one["weights_id"], one["tenants"], one["is_retired"]) for one in listed["weights"]] == [
            ("new", ["red"], False),
            ("old", ["red"], False),
        ]
        dry = (await red.post("/v1/weights/retired", params={"weights_id": "old"})).json()
        assert (dry["is_dry_run"], dry["weights"]["is_retired"]) == (True, False)
        assert dry["weights"]["held"]["filesystem"]["num_boundaries"] == 2
        assert set((await hits()).values()) == {128}
        done = (await red.post("/v1/weights/retired", params=query)).json()
        assert (done["is_dry_run"], done["weights"]["is_retired"]) == (False, True)
        assert await hits() == {place: 0 if place == ("red", "old") else 128 for place in prompts}
        namespace = prompts["red", "old"].namespace.hex()
        assert (await red.get(f"/v1/namespaces/{namespace}")).json()["is_retired"] is True
        asked = (await red.post("/v1/lookup", json={"namespace": namespace, "token_ids": [1] * 64})).json()
        assert asked["is_retired"] is True
        assert all(not one["is_retired"] for one in (await blue.get("/v1/weights")).json()["weights"])
        both = {one["weights_id"]: one for one in (await operator.get("/v1/weights")).json()["weights"]}
        assert both["old"]["tenants"] == ["blue", "red"] and both["old"]["is_retired"] is False
        await operator.post("/v1/weights/retired", params=query)
        assert (await hits())["blue", "old"] == 0
        await red.delete("/v1/weights/retired", params=query)
        assert (await hits())["red", "old"] == 0
        await operator.delete("/v1/weights/retired", params=query)
        assert set((await hits()).values()) == {128}
        unknown = await red.post("/v1/weights/retired", params={"weights_id": "nobody's", "confirm": "true"})
        assert (unknown.status_code, unknown.json()["field"]) == (404, "weights_id")


async def test_a_namespace_that_was_just_opened_fails_no_list(
    made: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which namespaces there are, and what each holds, are read at different times and kept for a second."""
    monkeypatch.setattr(catalog_access, "FRESH_S", 60.0)
    known, fresh = (Prompt(ATTENTION, "a", 128, tenant="red", weights_id=weights) for weights in ("old", "new"))
    await made.save(known)
    async with made.client("operator") as client:
        assert (await client.get(f"/v1/pins?namespace={known.namespace.hex()}")).status_code == 200
        await made.save(fresh)
        weights = (await client.get("/v1/weights")).json()
        assert weights["is_complete"] and len(weights["weights"]) == 2
        job = await ended(client, await client.post("/v1/gc"))
        assert (job["state"], job["error"]) == ("done", None)
