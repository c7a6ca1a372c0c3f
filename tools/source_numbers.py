"""Print how large the source is and how it is cut: lines, files, classes, small modules, long argument lists.

Counts `kvstore` without `kvstore/testing`, `connector` and `migrations`, and beside them the tests. usage:
source_numbers.py [--json] [--list] [ROOT]
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("connector", "kvstore", "migrations")
SMALL_LINES = 60
ARGUMENTS_MAX = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="also name the modules and constructors that are counted")
    arguments = parser.parse_args()
    numbers, named = measure(arguments.root)
    if arguments.json:
        print(json.dumps({**numbers, **named} if arguments.list else numbers, indent=2))
        return
    width = max(map(len, numbers))
    for name, value in numbers.items():
        print(f"{name:<{width}}  {value}")
    if arguments.list:
        for name, places in named.items():
            print(f"\n{name}:", *places, sep="\n  ")


def measure(root: Path) -> tuple[dict[str, int | float | str], dict[str, list[str]]]:
    """The numbers by name, and by name what some of them count."""
    modules = {path: ast.parse((root / path).read_text()) for path in _files(root, *PRODUCT)}
    lines = {path: len((root / path).read_text().splitlines()) for path in modules}
    small = sorted(str(path) for path in modules if path.name != "__init__.py" and lines[path] < SMALL_LINES)
    single = sorted(_one_importer(modules))
    constructors = sorted(_constructors(modules), reverse=True)
    folders: dict[Path, int] = defaultdict(int)
    for path in modules:
        folders[path.parent] += 1
    largest, fullest = max(lines, key=lines.__getitem__), max(folders, key=folders.__getitem__)
    tests = {path: len((root / path).read_text().splitlines()) for path in _files(root, "tests")}
    numbers: dict[str, int | float | str] = {
        "lines": sum(lines.values()),
        "files": len(lines),
        "classes": sum(isinstance(node, ast.ClassDef) for tree in modules.values() for node in ast.walk(tree)),
        "median file, lines": statistics.median(lines.values()),
        "largest file, lines": f"{lines[largest]} {largest}",
        f"modules under {SMALL_LINES} lines": len(small),
        "modules with one importer, in the same folder": len(single),
        "most files in a folder": f"{folders[fullest]} {fullest}",
        "longest constructor, arguments": f"{constructors[0][0]} {constructors[0][1]}",
        f"constructors with more than {ARGUMENTS_MAX} arguments": sum(n > ARGUMENTS_MAX for n, _ in constructors),
        "layers of imports in kvstore": _layers(root),
        "settings": _settings(root),
        "meters": len(_meters(modules)),
        "verbs of the command line": _verbs(root),
        "lines of kvstore/testing": sum(
            len((root / path).read_text().splitlines()) for path in _files(root, "kvstore/testing", keeps_testing=True)
        ),
        "lines of tests": sum(tests.values()),
        "files of tests": len(tests),
    }
    named = {
        f"modules under {SMALL_LINES} lines, by name": small,
        "modules with one importer, by name": single,
        f"constructors with more than {ARGUMENTS_MAX} arguments, by name": [
            f"{count} {name}" for count, name in constructors if count > ARGUMENTS_MAX
        ],
    }
    return numbers, named


def _files(root: Path, *folders: str, keeps_testing: bool = False) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            if keeps_testing or relative.parts[:2] != ("kvstore", "testing"):
                yield relative


def _one_importer(modules: dict[Path, ast.Module]) -> Iterator[str]:
    """Modules that one module alone imports, where that one is in the same folder."""
    by_name = {".".join(path.with_suffix("").parts): path for path in modules}
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path, tree in modules.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if name in by_name and by_name[name] != path:
                    importers[by_name[name]].add(path)
    for path, of in importers.items():
        if len(of) == 1 and next(iter(of)).parent == path.parent and path.name != "__init__.py":
            yield str(path)


def _constructors(modules: dict[Path, ast.Module]) -> Iterator[tuple[int, str]]:
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                        arguments = inner.args
                        count = len(arguments.args) + len(arguments.kwonlyargs) + len(arguments.posonlyargs) - 1
                        yield count, f"{path}:{node.name}"


def _layers(root: Path) -> int:
    found = re.search(r'containers = \["kvstore"\].*?layers = \[(.*?)\]', (root / "pyproject.toml").read_text(), re.S)
    return found[1].count('",') if found else 0


def _settings(root: Path) -> int:
    """Fields of the two classes of settings."""
    count = 0
    for path, name in (("kvstore/settings.py", "Settings"), ("connector/settings.py", "ConnectorSettings")):
        for node in ast.walk(ast.parse((root / path).read_text())):
            if isinstance(node, ast.ClassDef) and node.name == name:
                count += sum(
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and not field.target.id.startswith("model_")
                    for field in node.body
                )
    return count


def _meters(modules: dict[Path, ast.Module]) -> set[str]:
    """Names that are given to `add`, `set` or `observe` as a literal beginning."""
    found = set()
    for tree in modules.values():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("add", "set", "observe")
                and "meters" in ast.unparse(node.func.value)
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and isinstance(node.args[0].value, str)
            ):
                found.add(node.args[0].value)
    return found


def _verbs(root: Path) -> int:
    """Verbs in the first column of the table in docs/cli.md."""
    rows = re.findall(r"^\| (`[^|]*) \|", (root / "docs" / "cli.md").read_text(), re.M)
    return len({verb for row in rows for verb in re.findall(r"`([a-z]+)`", row)})


if __name__ == "__main__":
    main()
