"""Pages that people come to with a message: what they quote is said, and what they link to is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, files

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_FRAGMENT_CHARS_MIN = 12


@cache
def said() -> str:
    """The whole code, its texts in one piece where they go on in the next line."""
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join((ROOT / path).read_text() for path in files("kvstore", "connector")))


def quoted_messages() -> list[str]:
    """First column of the tables of messages, piece by piece."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = page.partition("## Errors in a log")[2].partition("## After an upgrade")[0]
    cells = re.findall(r"^\| (`.*?`) \|", tables, re.MULTILINE)
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]
    pieces = [piece.strip(" :") for quote in quotes for piece in re.split(r"\.\.\.|tier redis|setting X", quote)]
    return [piece for piece in pieces if len(piece) >= _FRAGMENT_CHARS_MIN]


def test_messages_that_are_explained_are_said() -> None:
    """Whoever changes a message changes the page that explains it."""
    quotes = quoted_messages()
    assert len(quotes) > 12
    assert [quote for quote in quotes if quote not in said()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every file that a page links to is there."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []
