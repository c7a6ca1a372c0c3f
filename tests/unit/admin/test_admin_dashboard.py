"""The files of the dashboard: without a token, compressed, cached, and under a strict policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.service.admin.resources import dashboard
from kvstore.service.admin.resources.dashboard import FOLDER
from tests.unit.admin.service_harness import open_service


async def test_files_need_no_token(tmp_path: Path) -> None:
    """The page and each file need no token; the policy allows nothing inline and no other host."""
    async with open_service(tmp_path) as made, made.client() as client:
        for name in ("", *(f"dashboard/{path.name}" for path in FOLDER.iterdir())):
            answer = await client.get(f"/{name}")
            assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert answer.headers["content-encoding"] == "gzip"
        kind = (await client.get("/dashboard/app.js")).headers["content-type"]
        assert kind == "text/javascript; charset=utf-8"
        for name in ("none.js", "..%2fapp.py", "__init__.py"):
            assert (await client.get(f"/dashboard/{name}")).status_code in (401, 404)


async def test_unknown_names_leave_nothing_behind(tmp_path: Path) -> None:
    """Anyone may ask for any number of names, without a token."""
    async with open_service(tmp_path) as made, made.client() as client:
        num_kept = dashboard.load.cache_info().currsize
        for number in range(10):
            assert (await client.get(f"/dashboard/{number}.js")).status_code == 404
        assert dashboard.load.cache_info().currsize == num_kept


async def test_the_library_is_kept_by_its_digest(tmp_path: Path) -> None:
    """The address of the library contains its digest and is cached for a year. Every other file is revalidated, and not
    sent again while it is unchanged.
    """
    async with open_service(tmp_path) as made, made.client() as client:
        page = await client.get("/")
        found = re.search(r'data-charts="(/dashboard/charts\.js\?v=[0-9a-f]{16})"', page.text)
        assert found is not None
        library = await client.get(found[1])
        assert "immutable" in library.headers["cache-control"] and "Chart.js" in library.text[:100]
        assert (await client.get("/dashboard/charts.js?v=0")).headers["cache-control"] == "no-cache"
        again = await client.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        plain = await client.get("/", headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers and plain.text == page.text


async def test_without_the_library_the_rest_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package of the library the page works without charts."""
    monkeypatch.setattr(dashboard, "find_spec", lambda name: None)
    dashboard.load.cache_clear()
    try:
        async with open_service(tmp_path) as made, made.client() as client:
            assert 'data-charts=""' in (await client.get("/")).text
            assert (await client.get("/dashboard/charts.js")).status_code == 404
    finally:
        dashboard.load.cache_clear()


def test_files_name_no_other_host() -> None:
    """No file names another host, has an inline script or style, or inserts text as HTML."""
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]+/", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path.name
        if path.suffix == ".html":
            assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon[a-z]+=", text)
