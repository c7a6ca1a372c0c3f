"""A package's README with a list of files names every file beside it; no README names a file that does not exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

READMES = sorted(
    path.relative_to(ROOT)
    for root in ("kvstore", "connector", "benchmarks")
    for path in (ROOT / root).rglob("README.md")
)
TABLE_OF_FILES = re.compile(r"^\| file\b.*\|$", re.MULTILINE)
COMPLETE = [
    readme
    for readme in READMES
    if readme == Path("benchmarks/README.md") or TABLE_OF_FILES.search((ROOT / readme).read_text())
]
"""READMEs that name all files: those with a table of files, and one that has its files in sentences."""
_IN_BACKTICKS = re.compile(r"`([^`\s]+)`")


def names(readme: Path) -> list[str]:
    """What stands in backticks, outside fenced blocks."""
    text = re.sub(r"^```.*?^```", "", (ROOT / readme).read_text(), flags=re.MULTILINE | re.DOTALL)
    return _IN_BACKTICKS.findall(text)


@cache
def project_files() -> frozenset[str]:
    return frozenset(
        str(path.relative_to(ROOT))
        for folder in ("kvstore", "connector", "benchmarks", "tests", "docs", "demo", "migrations", "tools")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md")
    )


def exists(name: str, readme: Path) -> bool:
    """Whether a path is of a file: beside the README, from the root, or from the package that the README is in."""
    starts = (readme.parent, *readme.parent.parents)
    return any(str(start / name) in project_files() or (ROOT / start / name).is_file() for start in starts)


@pytest.mark.parametrize("readme", COMPLETE, ids=str)
def test_each_file_is_named(readme: Path) -> None:
    """Also one that is new."""
    beside = {path.name for path in (ROOT / readme).parent.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert sorted(beside - set(names(readme))) == []


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_each_named_file_exists(readme: Path) -> None:
    paths = [name for name in names(readme) if re.fullmatch(r"[\w./-]+\.(py|md)", name)]
    assert [path for path in paths if not exists(path, readme)] == []
