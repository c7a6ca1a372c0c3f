"""Jobs on the dashboard: started, with a dry run where they delete, watched, cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Locator

from kvstore.format.names import format_name
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.waiting import until
from tests.browser.conftest import Visit, Visiting
from tests.unit.admin.service_harness import ServiceHarness, open_service, prompt_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.servers]

OLD = Prompt(ATTENTION, "old", 64 * 3, tenant="red", weights_id="old")
LARGE = Prompt(HYBRID, "large", 64 * 16, payload_bytes=5_000)
SLOW = {"bytes_per_s": 12_500}
"""Two or three records a second, of eighty."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def made(folder: Path) -> AsyncIterator[ServiceHarness]:
    """A directory with a prompt of retired weights, one of current weights, and one that is slow to read."""
    async with open_service(folder, with_tokens=False) as opened:
        for prompt in (OLD, prompt_of("new"), LARGE):
            await opened.save(prompt)
        async with opened.client() as client:
            retired = await client.post("/v1/weights/retired", params={"weights_id": "old", "confirm": "true"})
            assert retired.status_code == 200
        yield opened


async def press(visit: Visit, name: str) -> None:
    await visit.page.get_by_role("button", name=name, exact=True).click()


def row_of(visit: Visit, name: str) -> Locator:
    return visit.page.get_by_role("row").filter(has_text=name).first


async def test_a_job_is_watched_and_cancelled(made: ServiceHarness, visiting: Visiting) -> None:
    """A running job's bar moves by itself; cancelling it needs a confirmation, and its end is shown at once."""
    async with made.client() as client, visiting(made.url) as visit:
        job = (await client.post("/v1/tiers/cold/verify", params=SLOW)).json()["job"]
        await visit.open("jobs")
        row = row_of(visit, "verification")
        button = await row.get_by_role("button").element_handle()
        await moved(row)
        assert button is not None and await button.evaluate("(one) => one.isConnected")  # changed in place
        await row.get_by_role("button").click()
        dialog = visit.page.get_by_role("dialog")
        await dialog.get_by_role("progressbar").wait_for()
        await visit.shoot_twice("job")
        await press(visit, "Cancel the job…")
        await press(visit, "Let it run")
        assert (await client.get(f"/v1/jobs/{job}")).json()["state"] == "running"
        await press(visit, "Cancel the job…")
        await visit.shoot_as("job-cancel", 390, "dark")
        await press(visit, "Cancel it")
        await visit.page.get_by_text("The job was cancelled.").wait_for()
        await dialog.get_by_text("cancelled", exact=True).wait_for()
        await press(visit, "Close")
        await row_of(visit, "verification").get_by_text("cancelled", exact=True).wait_for()
        assert (await client.get(f"/v1/jobs/{job}")).json()["state"] == "cancelled"


async def moved(place: Locator) -> None:
    """Wait until a bar moves."""
    bar = place.get_by_role("progressbar")
    before = await bar.evaluate("(one) => one.value")
    await until(lambda: bar.evaluate("(one) => one.value"), holds=lambda now: now != before)


async def test_garbage_is_collected_after_a_dry_run(made: ServiceHarness, visiting: Visiting) -> None:
    """The dry run shows by reason what would be deleted; a second click deletes it, and both jobs are listed."""
    path = f"/v1/namespaces/{OLD.namespace.hex()}"
    async with made.client() as client, visiting(made.url) as visit:
        await visit.open("jobs")
        await press(visit, "Collect garbage…")
        dialog = visit.page.get_by_role("dialog")
        await dialog.get_by_text("Nothing has been deleted yet").wait_for()
        assert "of retired weights" in await dialog.inner_text()
        assert (await client.get(path)).json()["num_boundaries"] == 3
        await visit.shoot_twice("garbage")
        await press(visit, "Delete for good")
        await visit.page.get_by_text("Deleted: 6 records from filesystem.").wait_for()
        assert (await client.get(path)).json()["num_boundaries"] == 0
        for name in ("garbage collection", "garbage collection, dry run"):
            await visit.page.get_by_role("button", name=name, exact=True).wait_for()
        await press(visit, "Collect garbage…")
        await dialog.get_by_text("There is nothing to delete.").wait_for()
        assert await visit.page.get_by_role("button", name="Delete for good").is_disabled()


async def test_work_on_a_tier(made: ServiceHarness, folder: Path, visiting: Visiting) -> None:
    """Each job is confirmed and shown until it ends. A corrupt record is named. A paused write-back cannot be drained
    until it is resumed.
    """
    name = format_name(LARGE.key(64))
    path = folder / "records" / name
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    async with made.client() as client, visiting(made.url, expected="409") as visit:
        await visit.open("tiers")
        assert await visit.page.get_by_role("button", name="memory").count() == 0
        dialog = visit.page.get_by_role("dialog")
        await press(visit, "Verify… filesystem")
        await visit.page.get_by_label("At most").select_option("1,000 MiB a second")
        await visit.shoot_as("verify", 1280, "dark")
        await press(visit, "Start")
        await dialog.get_by_text("Result").wait_for()
        (job, *_) = (await client.get("/v1/jobs")).json()["jobs"]
        assert (job["kind"], job["report"]["num_bad"]) == ("verify", 1)
        await dialog.get_by_text(f"{name}: ").wait_for()
        await visit.shoot_as("verified", 390, "light")
        assert f"whole\n{job['report']['num_whole']}" in (await dialog.inner_text())
        await press(visit, "Close")

        await press(visit, "Pause write-back… filesystem")
        await press(visit, "Pause it")
        await visit.page.get_by_text("paused by an operator").wait_for()
        await press(visit, "Drain… filesystem")
        await press(visit, "Start")
        await dialog.get_by_text("resume it first").wait_for()
        await press(visit, "Cancel")
        await press(visit, "Resume write-back filesystem")
        await visit.page.get_by_text("paused by an operator").wait_for(state="detached")

        await visit.open("jobs")
        await press(visit, "Reindex…")
        await press(visit, "Start")
        await dialog.get_by_text("Result").wait_for()
        assert (await client.get("/v1/jobs")).json()["jobs"][0]["kind"] == "reindex"
