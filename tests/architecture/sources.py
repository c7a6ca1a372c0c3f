"""The project's own Python files, parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvstore", "connector", "migrations", "demo", "benchmarks")
FOLDERS = (*PACKAGES, "tests", "tools")


def files(*folders: str) -> list[Path]:
    """Python files under folders of the project, relative to its root."""
    return sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), str(path))


@cache
def imports(path: Path) -> list[tuple[str, int, bool]]:
    """Every absolute import of a file: module name, line, and whether it runs when the file is imported."""
    module = tree(path)
    deferred = {
        id(inner)
        for outer in ast.walk(module)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, id(node) not in deferred) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.module, node.lineno, id(node) not in deferred))
    return found


def imports_of(names: tuple[str, ...], *folders: str) -> dict[str, list[Path]]:
    """By top-level name: the files that import it anywhere."""
    found: dict[str, list[Path]] = {name: [] for name in names}
    for path in files(*folders):
        for module, _, _ in imports(path):
            top = module.split(".")[0]
            if top in found and path not in found[top]:
                found[top].append(path)
    return found
