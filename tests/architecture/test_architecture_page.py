"""`docs/architecture.md` names folders and functions: all of them exist, and no picture is longer than a page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
STEPS_MAX = 12


def picture(title: str) -> list[str]:
    """Lines of the first fenced block under a heading."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return section.split("```")[1].strip("\n").splitlines()


def has(folder: Path, name: str) -> bool:
    """Whether a module of a folder defines a function, or a class with this method."""
    owner, _, function = name.rpartition(".")
    for path in folder.rglob("*.py"):
        body: list[ast.stmt] = ast.parse(path.read_text()).body
        if owner:
            classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
            body = [node for found in classes for node in found.body]
        if any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function for node in body):
            return True
    return False


@pytest.mark.parametrize("title", ["A save", "A load"])
def test_each_function_of_a_picture_exists(title: str) -> None:
    """In order, at most twelve."""
    steps = [re.fullmatch(r" ?(\d+) (\S+) +([\w.]+) +\S.*", line) for line in picture(title)]
    assert None not in steps
    assert [int(step[1]) for step in steps if step] == list(range(1, len(steps) + 1))
    assert 6 <= len(steps) <= STEPS_MAX
    missing = [f"{step[2]}: {step[3]}" for step in steps if step and not has(ROOT / step[2], step[3])]
    assert missing == []


def test_each_folder_has_its_row() -> None:
    """The table of folders has each package of the source, and nothing else."""
    section = PAGE.partition("\n## Where things are\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"\(\.\./((?:kvstore|connector)/[\w.]+)\)", section))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    packages = {
        str(path.parent.relative_to(ROOT))
        for root in ("kvstore", "connector")
        for path in (ROOT / root).glob("*/__init__.py")
    }
    assert packages - named == {"kvstore/testing"}  # it is not on the way of a page
