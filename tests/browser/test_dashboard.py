"""The dashboard in a real browser, over a real service with a real Redis and a directory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from playwright.async_api import Route

from kvstore.api import Outcome
from kvstore.testing.servers import RedisServer
from tests.browser.conftest import Visiting
from tests.browser.stocked import BLUE, RED, stocked
from tests.unit.admin.service_harness import ServiceHarness

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.servers]

VIEWS = {"overview": 2, "misses": 1, "prefixes": 0, "tenants": 0, "tiers": 0, "jobs": 0, "events": 0}
"""Each with the number of its charts."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def made(tmp_path_factory: pytest.TempPathFactory, shared_redis: RedisServer) -> AsyncIterator[ServiceHarness]:
    async with stocked(tmp_path_factory.mktemp("stocked"), shared_redis) as opened:
        yield opened


async def test_every_view_shows_its_data(made: ServiceHarness, visiting: Visiting) -> None:
    """Each view at both widths in both colours: data is there, charts are drawn, nothing is wider than the window."""
    async with visiting(made.url) as visit:
        for view, num_charts in VIEWS.items():
            await visit.open(view)
            await visit.charts(num_charts)
            assert await visit.page.locator(".placeholder:visible").count() == 0, view
            assert await visit.page.locator("nav [aria-current=page]").get_attribute("href") == f"#{view}"
            await visit.shoot_everywhere(view)


async def test_numbers_are_the_services(made: ServiceHarness, visiting: Visiting) -> None:
    """Tiles, charts and tables show the numbers that the routes return."""
    async with made.client() as client, visiting(made.url) as visit:
        history = (await client.get("/v1/history")).json()
        await visit.open("overview")
        await visit.charts(2)
        text = await visit.page.inner_text("main")
        resumed, prompt = (sum(history["tokens"][part]) for part in ("resumed", "prompt"))
        assert 0 < resumed < prompt and f"{100 * resumed / prompt:.1f} %" in text
        held = "Chart.getChart(document.querySelectorAll('canvas')[1]).data.datasets"
        drawn = await visit.page.evaluate(f"{held}.map((one) => [one.label, one.data.at(-1).y])")
        last = {tier: values[-1] for tier, values in history["tier_bytes"].items()}
        assert dict(drawn) == {"redis (server memory)" if tier == "redis" else tier: last[tier] for tier in last}
        await visit.open("tenants")
        rows = await visit.page.locator("table").first.locator("tbody tr").all_inner_texts()
        assert [row.split()[0] for row in rows] == ["blue", "red"]
        assert "none" in rows[0] and "of 8.0 MiB, 1.0 MiB guaranteed" in rows[1]
        await visit.open("tiers")
        assert await visit.page.locator("section h2").all_inner_texts() == ["memory", "redis", "filesystem"]


async def test_a_request_is_explained(made: ServiceHarness, visiting: Visiting) -> None:
    """A click on a recent request shows the explanation that the route returns."""
    request, stop = "chatcmpl-asked-for", replace(RED, name="never seen").boundary(64)
    made.store.report(Outcome(request, RED.namespace, 336, 336, 0, 0, "nothing_stored", stop=stop, tenant="red"))
    async with made.client() as client, visiting(made.url) as visit:
        told = (await client.get("/v1/requests/explain", params={"request": request})).json()
        await visit.open("misses")
        await visit.page.get_by_role("button", name=request, exact=True).click()
        dialog = visit.page.get_by_role("dialog")
        await dialog.get_by_text(told["why"]).wait_for()
        assert told["reason"] == "never_stored" and told["reason"] in await dialog.inner_text()
        await visit.shoot("explained-1280-light")
        await visit.page.keyboard.press("Escape")
        await dialog.wait_for(state="detached")


async def test_a_prefix_is_pinned_and_deleted(made: ServiceHarness, visiting: Visiting) -> None:
    """Down the tree to the end of a prompt: pinned, its deletion is refused; unpinned, it is deleted after a dry run.
    An open events view shows each change at once.
    """
    end = RED.boundary(RED.num_tokens).prefix.hex()
    path = f"/v1/prefixes/{RED.namespace.hex()}/{end}"
    async with made.client() as client, visiting(made.url, expected="409") as visit, visiting(made.url) as watching:
        page = visit.page
        await watching.open("events")
        await watching.page.get_by_text("live", exact=True).wait_for()
        await visit.open(f"prefixes?namespace={RED.namespace.hex()}")
        await page.get_by_role("button", name=RED.boundary(320).prefix.hex()[:12]).click()
        dialog = page.get_by_role("dialog")
        await dialog.locator(".tree .here").wait_for()
        assert "256 tokens" in await dialog.inner_text()
        await visit.shoot("prefix-1280-light")
        await dialog.get_by_role("button", name=f"{RED.num_tokens} tokens").click()
        await dialog.get_by_text(end).wait_for()

        await dialog.get_by_role("button", name="Pin…").click()
        await page.get_by_label("For").select_option("3600")
        await page.get_by_role("button", name="Pin", exact=True).click()
        await dialog.get_by_role("button", name="Unpin").wait_for()
        assert (await client.get(path)).json()["pinned_until_s"] > 0
        await dialog.get_by_role("button", name="Delete…").click()
        await page.get_by_text("or on a later one").wait_for()
        assert await page.get_by_role("button", name="Delete for good").is_disabled()
        await page.get_by_role("button", name="Cancel").click()

        await dialog.get_by_role("button", name="Unpin").click()
        await dialog.get_by_role("button", name="Pin…").wait_for()
        await dialog.get_by_role("button", name="Delete…").click()
        await page.get_by_text("Nothing has been deleted yet").wait_for()
        assert (await client.get(path)).status_code == 200
        await visit.shoot("delete-1280-light")
        await page.get_by_role("button", name="Delete for good").click()
        await page.get_by_text("Deleted:").wait_for()
        assert (await client.get(path)).status_code == 404
        for said in ("a prefix was pinned", "a pin was removed", "a prefix was deleted"):
            await watching.page.get_by_text(said).wait_for()


async def test_a_namespace_is_shown_in_full(made: ServiceHarness, visiting: Visiting) -> None:
    """All fields of its description. Its deletion is cancelled after the dry run, and there is nothing unused to
    delete.
    """
    async with made.client() as client, visiting(made.url, width=390) as visit:
        await visit.open("tenants")
        await visit.page.get_by_role("button", name=BLUE.namespace.hex()[:8]).click()
        await visit.page.get_by_text('"page_tokens": 64').wait_for()
        await visit.page.get_by_role("button", name="Delete all of it…").click()
        await visit.page.get_by_text("Nothing has been deleted yet").wait_for()
        await visit.shoot("namespace-390-light")
        await visit.page.get_by_role("button", name="Cancel").click()
        await visit.page.get_by_role("button", name="Delete unused prefixes…").click()
        await visit.page.get_by_label("Not used for").select_option("3600")
        await visit.page.get_by_role("button", name="Dry run").click()
        await visit.page.get_by_text("There is nothing to delete.").wait_for()
        job = (await client.get("/v1/jobs")).json()["jobs"][0]
        assert (job["kind"], job["is_dry_run"], job["state"]) == ("deletion", True, "done")
        assert (await client.get(f"/v1/namespaces/{BLUE.namespace.hex()}")).json()["num_boundaries"] == 3


async def test_a_namespace_that_the_chooser_does_not_list(made: ServiceHarness, visiting: Visiting) -> None:
    """With hundreds of namespaces only the largest are listed: the chooser says so, and names the one that is shown."""

    async def first_alone(route: Route) -> None:
        response = await route.fetch()
        found = await response.json()
        listed = [one for one in found["namespaces"] if one["tenant"] == "red"]
        await route.fulfill(response=response, json={**found, "namespaces": listed, "next_cursor": "more"})

    async with visiting(made.url) as visit:
        await visit.page.route("**/v1/namespaces?*", first_alone)
        await visit.open(f"prefixes?namespace={BLUE.namespace.hex()}")
        chooser = visit.page.get_by_label("Namespace")
        assert await chooser.input_value() == BLUE.namespace.hex()
        assert "kvstore ls lists all" in await chooser.inner_text()


async def test_two_namespaces_are_compared_side_by_side(made: ServiceHarness, visiting: Visiting) -> None:
    """A second namespace is chosen: only the fields that differ are shown, with both values."""
    async with visiting(made.url) as visit:
        await visit.open("tenants")
        await visit.page.get_by_role("button", name=BLUE.namespace.hex()[:8]).click()
        await visit.page.get_by_label("Compare with").select_option(RED.namespace.hex())
        compared = visit.page.get_by_role("table", name="How they differ")
        await compared.wait_for()
        text = await compared.inner_text()
        assert '"blue"' in text and '"red"' in text and "page_tokens" not in text
        await visit.shoot("namespaces-compared")


async def test_one_request_has_a_link(made: ServiceHarness, visiting: Visiting) -> None:
    """While an explanation is open, the address leads to it; closed, the address is that of the view."""
    made.store.report(Outcome("to be linked", RED.namespace, 336, 336, 0, 0, "too_short", tenant="red"))
    async with visiting(made.url) as visit:
        await visit.open("misses")
        await visit.page.get_by_role("button", name="to be linked").click()
        await visit.page.get_by_role("dialog").get_by_text("shorter than one block").wait_for()
        link = visit.page.url
        assert link.endswith("#misses?request=to+be+linked")
        await visit.page.get_by_role("button", name="Close").click()
        await visit.page.wait_for_url(lambda url: url.endswith("#misses"))
        await visit.page.goto("about:blank")
        await visit.page.goto(link)
        await visit.page.get_by_role("dialog").get_by_text("shorter than one block").wait_for()


async def test_colours_are_chosen_and_kept(made: ServiceHarness, visiting: Visiting) -> None:
    """The toggle overrides the system's colours, a reload keeps the choice, and the keyboard reaches the toggle."""
    shade = "getComputedStyle(document.body).backgroundColor"
    async with visiting(made.url) as visit:
        await visit.open("overview")
        light = await visit.page.evaluate(shade)
        await visit.page.get_by_role("button", name="Switch to dark colours").focus()
        await visit.page.keyboard.press("Enter")
        dark = await visit.page.evaluate(shade)
        await visit.page.reload()
        await visit.charts(2)
        assert await visit.page.evaluate(shade) == dark != light


async def test_nothing_that_was_stored_becomes_html(made: ServiceHarness, visiting: Visiting) -> None:
    """A request id that contains markup is shown as text, and the policy refuses injected HTML."""
    name = "<img src=x onerror=alert(1)>"
    made.store.report(Outcome(name, None, 10, 10, 0, 0, "<b>odd</b>", tenant="red"))
    async with visiting(made.url, expected="TrustedHTML") as visit:
        await visit.open("misses")
        await visit.page.get_by_role("button", name=name).wait_for()
        assert await visit.page.locator("main img").count() == 0
        refused = await visit.page.evaluate(
            "() => { try { document.body.innerHTML = 'x' } catch (e) { return e.name } }"
        )
        assert refused == "TypeError"
