"""One Chromium for all tests of the dashboard, and checks of its pages."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

from kvstore.testing.servers.install import chromium_program
from kvstore.testing.waiting import until
from tests.architecture.sources import ROOT

SCREENSHOTS = ROOT / ".work" / "screenshots"
PATIENCE_MS = 60_000
_PAINTED = "new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done))))"
WIDTHS = {1280: 800, 390: 844}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Chromium without a window. It runs without its sandbox, which root cannot use, and without a container's small
    /dev/shm.
    """
    async with async_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        opened = await driver.chromium.launch(executable_path=chromium_program(), args=arguments)
        yield opened
        await opened.close()


@dataclass
class Visit:
    """A page that looks at a service, and what went wrong in it.

    Attributes:
        page: The browser's.
        url: Of the service.
        troubles: Errors of the console and of scripts, breaches of the content policy, requests to other hosts.
    """

    page: Page
    url: str
    troubles: list[str] = field(default_factory=list)

    async def open(self, view: str, expected: str = "main h1") -> None:
        """Go to a view, and wait until its data is shown."""
        await self.page.goto(f"{self.url}/#{view}")
        await self.page.wait_for_selector(f"{expected}:visible")
        await self.page.wait_for_selector("[aria-busy]", state="detached")

    async def charts(self, count: int) -> None:
        """Wait until this number of charts is drawn."""
        drawn = "[...document.querySelectorAll('canvas')].filter((c) => globalThis.Chart?.getChart(c)?.width).length"
        # Playwright's own waiting is what the page's policy forbids
        await until(lambda: self.page.evaluate(drawn), PATIENCE_MS / 1000, holds=lambda num: num == count)

    async def shoot(self, name: str) -> None:
        """Save a picture of the page, or of the window with a dialog in it; neither may be wider than the window."""
        await self.page.evaluate(_PAINTED)
        sizes = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        wide, window = await self.page.evaluate(sizes)
        assert wide <= window, f"{name} is {wide} pixels wide in a window of {window}"
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        dialogs = self.page.locator("dialog")
        for dialog in await dialogs.all():
            assert await dialog.evaluate("(box) => box.scrollWidth <= box.clientWidth"), name
        full_page = not await dialogs.count()
        await self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=full_page)

    async def shoot_everywhere(self, name: str) -> None:
        """Pictures at each width in both colours; all text must have enough contrast."""
        for width in WIDTHS:
            await self.shoot_as(name, width, "light")
            await self.shoot_as(name, width, "dark")

    async def shoot_twice(self, name: str) -> None:
        """Pictures at each width in one colour, for a view whose layout others show in all four ways."""
        await self.shoot_as(name, 390, "dark")
        await self.shoot_as(name, 1280, "light")

    async def shoot_as(self, name: str, width: int, colours: str) -> None:
        await self.page.set_viewport_size({"width": width, "height": WIDTHS[width]})
        await self.page.emulate_media(color_scheme="dark" if colours == "dark" else "light")
        await self.shoot(f"{name}-{width}-{colours}")
        await self.check_contrast()

    async def check_contrast(self) -> None:
        """All text has a contrast of at least 4.5 to 1 to its background."""
        found = await self.page.evaluate(_CONTRAST)
        assert found["count"] > 20 and found["weak"] == []

    def note(self, text: str) -> None:
        self.troubles.append(text)


_CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const bright = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const [r, g, b, a = 1] = rgb(getComputedStyle(one).backgroundColor);
      if (a > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const weak = [];
  let count = 0;
  for (const one of document.querySelectorAll("body *")) {
    const isText = [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!isText || !one.checkVisibility()) continue;
    const [high, low] = [bright(rgb(getComputedStyle(one).color)), bright(behind(one))].sort((a, b) => b - a);
    count += 1;
    if ((high + 0.05) / (low + 0.05) < 4.5) weak.push(`${one.tagName} ${one.className} ${one.textContent}`);
  }
  return { count, weak };
})()"""

Visiting = Callable[..., AbstractAsyncContextManager[Visit]]


@pytest.fixture
def visiting(browser: Browser) -> Visiting:
    """A visit to a service. It fails on console messages, script errors and foreign requests that are not expected."""

    @asynccontextmanager
    async def visit(
        url: str, *, width: int = 1280, colours: str = "light", expected: str = "$never"
    ) -> AsyncIterator[Visit]:
        context = await browser.new_context(
            viewport={"width": width, "height": WIDTHS[width]},
            color_scheme="dark" if colours == "dark" else "light",
            has_touch=width < 600,
        )
        context.set_default_timeout(PATIENCE_MS)
        page = await context.new_page()
        made = Visit(page, url)
        page.on("console", lambda told: made.note(told.text) if told.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: made.note(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith(f"{url}/") else made.note(f"asked {sent.url}"))
        yield made
        await context.close()
        assert [text for text in made.troubles if not re.search(expected, text)] == []

    return visit
