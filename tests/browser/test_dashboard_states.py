"""The dashboard of an empty store, of failing tiers and services, and with tokens."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.testing.servers import RedisServer, redis_server
from tests.browser.conftest import WIDTHS, Visiting
from tests.unit.admin.service_harness import open_service, prompt_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.servers]

VIEWS = ("overview", "misses", "prefixes", "tenants", "tiers", "jobs", "events")


async def test_an_empty_store_says_what_to_do(tmp_path: Path, visiting: Visiting, shared_redis: RedisServer) -> None:
    """Without any engine every view shows a hint, and none is broken."""
    async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
        await client.flushdb()
    hot = f"redis://{shared_redis.host}:{shared_redis.port}"
    async with open_service(tmp_path, with_tokens=False, hot=hot) as made, visiting(made.url) as visit:
        for view in VIEWS:
            await visit.open(view)
            if view in ("misses", "prefixes", "tenants", "jobs"):
                assert await visit.page.locator(".placeholder:visible").count() >= 1, view
            for width, height in WIDTHS.items():
                await visit.page.set_viewport_size({"width": width, "height": height})
                await visit.shoot(f"empty-{view}-{width}-light")


async def test_a_token_is_asked_for(tmp_path: Path, visiting: Visiting) -> None:
    """Without a token, with a wrong one, with a tenant's, and after it was removed. A tenant sees only its own data."""
    async with open_service(tmp_path) as made, visiting(made.url, expected="401") as visit:
        await made.save(prompt_of("a", "red"))
        await made.save(prompt_of("b", "blue"))
        page = visit.page
        await visit.open("tenants", "#token")
        await visit.shoot("token-1280-light")
        await page.get_by_label("Token", exact=True).fill("wrong token")
        await page.keyboard.press("Enter")
        await page.get_by_text("the token is not valid").wait_for()
        await visit.shoot("token-wrong-1280-light")
        await page.get_by_label("Token", exact=True).fill("red reader token")
        await page.keyboard.press("Enter")
        await page.get_by_role("heading", name="Tenants and namespaces").wait_for()
        assert await page.get_by_role("cell", name="blue").count() == 0
        assert await page.get_by_role("button", name="quota").count() == 0
        assert await page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 1, ""]
        await visit.open("overview")
        await visit.shoot("tenant-overview-1280-light")
        await page.get_by_role("button", name="Forget the token").click()
        await page.wait_for_selector("#token")
        assert await page.evaluate("sessionStorage.length") == 0


async def test_a_reader_is_refused_what_it_may_not(tmp_path: Path, visiting: Visiting) -> None:
    """A deletion with a read token is refused with a message, and nothing is deleted."""
    async with open_service(tmp_path) as made, visiting(made.url, expected="40[13]") as visit:
        prompt = await made.save(prompt_of("a", "red"))
        await visit.open("prefixes", "#token")
        await visit.page.get_by_label("Token", exact=True).fill("red reader token")
        await visit.page.keyboard.press("Enter")
        await visit.page.get_by_role("button", name=prompt.boundary(64).prefix.hex()[:12]).click()
        await visit.page.get_by_role("button", name="Delete…").click()
        await visit.page.get_by_text("the token lacks the scope admin").wait_for()
        await visit.shoot("refused-1280-light")
        assert await visit.page.get_by_role("button", name="Delete for good").is_disabled()


async def test_a_tier_fails_and_recovers_live(tmp_path: Path, visiting: Visiting) -> None:
    """Redis is killed: the events and the tiers show it at once, a job on it fails with the reason, and views that need
    the catalog are unavailable. After a restart all views work again.
    """
    with redis_server() as redis:
        hot = f"redis://{redis.host}:{redis.port}"
        async with (
            open_service(tmp_path, with_tokens=False, hot=hot) as made,
            visiting(made.url, expected="503") as visit,
        ):
            page = visit.page
            await visit.open("events")
            await page.get_by_text("live", exact=True).wait_for()
            redis.kill9()
            while made.store.events.after(0)[-1].kind.value != "tier_down":
                await made.port.watcher.step()
            await page.get_by_text("tier redis is off").wait_for()
            await visit.open("tiers")
            await page.locator(".badge.bad", has_text="not used until").wait_for()
            await visit.shoot("tier-down-1280-light")
            await page.get_by_role("button", name="Verify… redis").click()
            await page.get_by_role("button", name="Start").click()
            await page.get_by_role("dialog").get_by_text("failed", exact=True).wait_for()
            await page.get_by_role("alert").get_by_text("cannot connect to Redis").wait_for()
            await visit.shoot("job-failed-1280-light")
            await page.get_by_role("button", name="Close").click()
            await visit.open("jobs")
            row = page.get_by_role("row", name="verification tier hot")
            await row.get_by_text("cannot connect to Redis").wait_for()
            await visit.shoot_twice("jobs-failed")
            await visit.open("prefixes")
            await page.get_by_role("heading", name="This is not available at the moment").wait_for()
            await visit.shoot("unavailable-1280-light")
            await visit.open("events")
            redis.restart()
            await page.get_by_text("tier redis is back").wait_for()
            await visit.open("prefixes")
            await page.get_by_text("The catalog lists nothing").wait_for()


async def test_a_service_that_is_gone(tmp_path: Path, visiting: Visiting) -> None:
    """The service stops while pages are open: the live view and the next view report it, and a view that was shown
    keeps its values, marked as old.
    """
    expected = "ERR_|network error|Failed to load"
    async with AsyncExitStack() as visits:
        async with open_service(tmp_path, with_tokens=False) as made:
            await made.save(prompt_of("a"))
            async with made.client() as client:
                await client.post("/v1/tiers/cold/verify", params={"bytes_per_s": 1})
            visit = await visits.enter_async_context(visiting(made.url, width=390, expected=expected))
            watching = await visits.enter_async_context(visiting(made.url, expected=expected))
            await visit.open("events")
            await visit.page.get_by_text("live", exact=True).wait_for()
            await watching.open("jobs")
            await watching.page.get_by_role("button", name="verification").click()
            dialog = watching.page.get_by_role("dialog")
            await dialog.get_by_role("progressbar").wait_for()
        await visit.page.get_by_text("not connected").wait_for()
        await dialog.get_by_text("the service does not answer").wait_for()
        await watching.page.get_by_text("These values are old").wait_for()
        assert await dialog.get_by_role("progressbar").count() == 1
        await watching.shoot("job-gone-1280-light")
        await visit.page.get_by_role("link", name="Tiers").click()
        await visit.page.get_by_role("heading", name="The service does not answer").wait_for()
        await visit.shoot("gone-390-light")


async def test_a_frozen_tier_keeps_its_last_known_sizes(tmp_path: Path, visiting: Visiting) -> None:
    """The last known sizes are shown as such, never as 0, and lines of the chart stop."""
    with redis_server() as redis:
        hot = f"redis://{redis.host}:{redis.port}"
        async with (
            open_service(tmp_path, with_tokens=False, hot=hot) as made,
            visiting(made.url, expected="503") as visit,
        ):
            page = visit.page
            await made.save(prompt_of("a"))
            await made.port.watcher.step()
            await visit.open("tiers")
            redis.freeze()
            try:
                while made.store.events.after(0)[-1].kind.value != "tier_down":
                    await made.port.watcher.step()
                await visit.open("tiers")
                await page.get_by_text("last known, ").first.wait_for()
                await visit.shoot("tier-frozen-1280-light")
                await visit.open("overview")
                tile = page.locator(".tile", has_text="kept in ")
                await tile.get_by_text("last known, ").wait_for()
                assert "0 bytes" not in (await tile.inner_text()).splitlines()
                await visit.charts(1)
                data = "Chart.getChart(document.querySelector('canvas')).data"
                lines = await page.evaluate(f"{data}.datasets.map((one) => [one.label, one.spanGaps, !one.stack])")
                assert ["redis (server memory)", False, True] in lines
                await visit.shoot("overview-frozen-1280-light")
            finally:
                redis.thaw()
