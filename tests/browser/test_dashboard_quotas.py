"""Quotas on the dashboard: typed, checked, confirmed, withdrawn, refused."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvstore.runtime.sizes import parse_bytes
from tests.browser.conftest import Visit, Visiting
from tests.unit.admin.service_harness import ServiceHarness, open_service, prompt_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.servers]

SIZES = ("10GiB", "1.5 TiB", " 500 mb ", "7", "0", "3kB", "2PiB", "5b", "1e3", "", "GiB", "-1GiB", "10 gigs", "1,5GiB")
"""Sizes and what is none."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def made(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServiceHarness]:
    """Two tenants; the settings give one of them a quota."""
    folder = tmp_path_factory.mktemp("quotas")
    async with open_service(folder, with_tokens=False, cold_bytes="256MiB", quotas="red=1MiB:2MiB") as opened:
        for tenant in ("red", "blue"):
            await opened.save(prompt_of("a", tenant))
        yield opened


async def fill(visit: Visit, **texts: str) -> None:
    for label, text in texts.items():
        await visit.page.get_by_label(label.capitalize(), exact=True).fill(text)
    await visit.page.get_by_role("button", name="Continue…").click()


async def check_sizes(visit: Visit) -> None:
    """The page and the command line parse a size in the same way, and parse the text that the page writes."""

    def read(text: str) -> int | None:
        try:
            return parse_bytes(text)
        except ValueError:
            return None

    numbers = [0, 1, 1023, 1 << 10, 3 << 29, 10 << 30, 1_000_000_001, 1 << 60]
    sizes = "import('/dashboard/sizes.js')"
    found = await visit.page.evaluate(f"async (all) => all.map((await {sizes}).parseBytes)", list(SIZES))
    assert found == [read(text) for text in SIZES] and None in found
    texts = await visit.page.evaluate(f"async (all) => all.map((await {sizes}).typedBytes)", numbers)
    assert [parse_bytes(text) for text in texts] == numbers and "10GiB" in texts


async def test_a_quota_is_set_and_withdrawn(made: ServiceHarness, visiting: Visiting) -> None:
    """A quota is typed as on the command line, confirmed and set; when it is withdrawn, the settings apply again."""
    async with made.client() as client, visiting(made.url) as visit:
        page = visit.page
        (before,) = (await client.get("/v1/quotas")).json()["quotas"]
        await visit.open("tenants")
        await page.get_by_role("button", name="Change the quota of red").click()
        await check_sizes(visit)
        assert await page.get_by_label("Maximum").input_value() == "2MiB"
        assert await page.get_by_role("button", name="Withdraw it…").count() == 0
        await visit.shoot_twice("quota")
        await fill(visit, guaranteed="1.5 MiB", maximum="4mib")
        await page.get_by_text("4.0 MiB (4,194,304 bytes)").wait_for()
        assert (await client.get("/v1/quotas/red")).json() == before
        await visit.shoot_as("quota-confirm", 390, "dark")
        await page.get_by_role("button", name="Set the quota").click()
        await page.get_by_text("of 4.0 MiB, 1.5 MiB guaranteed").wait_for()
        told = (await client.get("/v1/quotas/red")).json()
        assert told == {**before, "guaranteed_bytes": 3 << 19, "maximum_bytes": 4 << 20, "is_ordered": True}
        await page.get_by_role("button", name="Change the quota of red").click()
        await page.get_by_role("button", name="Withdraw it…").click()
        await visit.shoot_as("quota-withdraw", 1280, "light")
        await page.get_by_role("button", name="Withdraw it", exact=True).click()
        await page.get_by_text("of 2.0 MiB, 1.0 MiB guaranteed").wait_for()
        assert (await client.get("/v1/quotas/red")).json() == before


async def test_wrong_input_is_marked(made: ServiceHarness, visiting: Visiting) -> None:
    """The page or the service finds the mistake: the field is marked, the input stays, and nothing is set. Corrected,
    the quota is set, also for a new tenant with special characters.
    """
    async with made.client() as client, visiting(made.url, expected="422") as visit:
        page, before = visit.page, (await client.get("/v1/quotas")).json()
        await visit.open("tenants")
        await page.get_by_role("button", name="Set a quota…").click()
        wrongs = (
            ({"tenant": "a b", "guaranteed": "", "maximum": "1GiB"}, "Tenant", "without spaces"),
            ({"tenant": "blue", "guaranteed": "10 gigs"}, "Guaranteed", "expected bytes, like 8GiB, 500MB or 1048576"),
            ({"guaranteed": "2GiB"}, "Maximum", "it is less than the guaranteed size"),
            ({"maximum": "0"}, "Maximum", "expected more than 0"),
            ({"maximum": "8PiB"}, "Maximum", "expected less than 8PiB"),
            ({"guaranteed": "", "maximum": ""}, "Guaranteed", "for neither, type 0"),
        )
        for texts, label, words in wrongs:
            await fill(visit, **texts)
            await page.get_by_role("alert").get_by_text(words).wait_for()
            (marked,) = await page.locator("[aria-invalid]").all()
            assert await marked.get_attribute("name") == label.lower(), words
            assert (await page.get_by_role("alert").inner_text()).startswith(f"{label}: ")
        await fill(visit, guaranteed="1TiB", maximum="2TiB")
        await page.get_by_role("button", name="Set the quota").click()
        await page.locator("[aria-invalid][name=guaranteed]").wait_for()
        assert await page.get_by_label("Maximum").input_value() == "2TiB"
        await visit.shoot_twice("quota-refused")
        assert (await client.get("/v1/quotas")).json() == before
        await fill(visit, tenant="team/green?", guaranteed="", maximum="8GiB")
        await page.get_by_role("button", name="Set the quota").click()
        await page.get_by_role("button", name="Change the quota of team/green?").wait_for()
        told = (await client.get("/v1/quotas/team%2Fgreen%3F")).json()
        assert (told["guaranteed_bytes"], told["maximum_bytes"], told["is_ordered"]) == (0, 8 << 30, True)
