"""Style as a test: what the linters cannot say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.architecture.sources import FOLDERS, PACKAGES, ROOT, files, tree

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

# `except Exception` stands where a piece of work ends that nobody else would end: it reports, it never hides.
TOPS = {
    "connector/vllm/contract.py": "the import of a module of vLLM: what it raises is a reason to run uncached",
    "connector/device/gpu.py": "a kernel that fails: a processor does its work",
    "connector/device/paths.py": "torch, Triton, the compiler that it calls, a GPU: why a way does not work is asked",
    "connector/blend/blender.py": "vLLM waits for each request that is blended, and for each audit",
    "connector/vllm/blending.py": "a thread's top",
    "connector/vllm/model_files.py": "a hub's client: the errors of ModelScope's have no other class in common",
    "connector/guard.py": "the guard of the engines' calls",
    "connector/offloading/lookups.py": "a thread's top: an answer is due",
    "connector/offloading/tier.py": "a background task's top, and the look for what a vLLM that has changed may lack",
    "connector/offloading/transfers.py": "a thread's top: the scheduler waits for the job",
    "connector/scheduler/namespace.py": "a background task's top",
    "connector/worker/audit.py": "a background task's top",
    "connector/worker/loader.py": "a background task's top",
    "connector/worker/saver.py": "a background task's top",
    "kvstore/cli/verbs.py": "the command line's main",
    "kvstore/client/connection.py": "a session's top: a caller's callback fails its own call alone",
    "kvstore/runtime/background.py": "the top of a task that is started again",
    "kvstore/service/admin/port.py": "a thread's top",
    "kvstore/service/session.py": "a session's top",
    "kvstore/store/recorder.py": "a background task's top",
    "kvstore/tiers/guarded.py": "a background task's top",
}

# Accesses to private names that tests have left, by file. A file that is not listed has none; a number only sinks.
PRIVATE_ACCESSES = {
    "tests/golden/test_golden_conversations.py": 1,
    "tests/integration/test_admin_schema.py": 1,
    "tests/integration/test_explain_departures.py": 3,
    "tests/integration/test_reports_of_an_outage.py": 1,
    "tests/integration/test_taken_over.py": 1,
    "tests/property/test_saves_properties.py": 18,
    "tests/security/test_admin_connections.py": 3,
    "tests/security/test_connections.py": 1,
    "tests/security/test_impostor.py": 1,
    "tests/security/test_long_hits.py": 1,
    "tests/security/test_strange_redis.py": 1,
    "tests/simulation/invariants.py": 22,
    "tests/simulation/rest.py": 8,
    "tests/unit/admin/test_admin_dashboard.py": 2,
    "tests/unit/admin/test_admin_events.py": 2,
    "tests/unit/admin/test_admin_isolation.py": 2,
    "tests/unit/admin/test_admin_jobs.py": 1,
    "tests/unit/admin/test_admin_port.py": 1,
    "tests/unit/cli/test_cli.py": 2,
    "tests/unit/cli/test_simulate.py": 1,
    "tests/unit/client/test_client_blocking.py": 2,
    "tests/unit/client/test_client_calls.py": 2,
    "tests/unit/client/test_client_embedded.py": 1,
    "tests/unit/client/test_client_namespaces.py": 3,
    "tests/unit/client/test_client_sharing.py": 1,
    "tests/unit/connector/rank_harness.py": 7,
    "tests/unit/connector/scheduler_harness.py": 1,
    "tests/unit/connector/test_connector_contract.py": 1,
    "tests/unit/connector/test_connector_device_ranks.py": 3,
    "tests/unit/connector/test_connector_device_threads.py": 1,
    "tests/unit/connector/test_connector_errors.py": 9,
    "tests/unit/connector/test_connector_fetching.py": 2,
    "tests/unit/connector/test_connector_group_saves.py": 1,
    "tests/unit/connector/test_connector_lookups.py": 1,
    "tests/unit/connector/test_connector_losses.py": 2,
    "tests/unit/connector/test_connector_low_priority.py": 6,
    "tests/unit/connector/test_connector_rank_loads.py": 2,
    "tests/unit/connector/test_connector_saves.py": 1,
    "tests/unit/connector/test_connector_step_order.py": 3,
    "tests/unit/connector/test_connector_trial.py": 1,
    "tests/unit/connector/test_connector_weights.py": 8,
    "tests/unit/connector/test_connector_worker.py": 25,
    "tests/unit/connector/test_connector_worker_audit.py": 3,
    "tests/unit/format/test_format_specification.py": 2,
    "tests/unit/runtime/test_runtime_turns.py": 1,
    "tests/unit/service/test_service_bad_peers.py": 4,
    "tests/unit/service/test_service_fairness.py": 5,
    "tests/unit/store/test_store_admission.py": 10,
    "tests/unit/store/test_store_catalog.py": 1,
    "tests/unit/store/store_harness.py": 1,
    "tests/unit/store/test_store_durability.py": 1,
    "tests/unit/store/test_store_manifests.py": 2,
    "tests/unit/store/test_store_reasons.py": 3,
    "tests/unit/store/test_store_reindexing.py": 1,
    "tests/unit/store/test_store_reports_kept.py": 6,
    "tests/unit/tiers/test_filesystem_index.py": 3,
    "tests/unit/tiers/test_redis_connection.py": 1,
}

# Spelled in pieces, so that this file does not contain them.
FORBIDDEN = tuple("".join(parts) for parts in (("FIX", "ME"), ("TO", "DO"), ("XX", "X"), ("/wo", "rk/")))


def test_ruff_check() -> None:
    """The linter finds nothing."""
    _tool("ruff", "check", ".")


def test_ruff_format() -> None:
    """The formatter would change nothing."""
    _tool("ruff", "format", "--check", ".")


def test_mypy() -> None:
    """The type checker, strict, finds nothing in `kvstore`."""
    _tool("mypy")


def test_names_of_test_files_are_unique() -> None:
    """Folders of tests are no packages: pytest ends the whole run where two files share a name."""
    counts = Counter(path.name for path in files("tests") if path.name.startswith("test_"))
    assert {name: count for name, count in counts.items() if count > 1} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_are_short(folder: str) -> None:
    """No file needs more than 600 lines: borders follow knowledge, and most files are far shorter."""
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in files(folder)}
    assert {path: length for path, length in lengths.items() if length > FILE_LINES_MAX} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_fit_a_screen(folder: str) -> None:
    """No function needs more than 70 lines, its docstring apart."""
    long = {}
    for path in files(folder):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                length = (node.end_lineno or 0) - first.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    long[f"{path}:{node.lineno} {node.name}"] = length
    assert long == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_constant_is_bound_twice(package: str) -> None:
    """Merging two modules may hide one of two constants of one name, which no linter reports."""
    twice = []
    for path in files(package):
        counts = Counter(
            target.id
            for node in tree(path).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and target.id.strip("_").isupper()
        )
        twice += [f"{path}: {name}" for name, count in counts.items() if count > 1]
    assert twice == []


def test_except_exception_has_few_places() -> None:
    """`except Exception` stands only at the tops that are listed, and each listed one still needs it."""
    seen = {str(path) for path in files(*PACKAGES) for handler in _handlers(path) if _catches(handler, "Exception")}
    assert seen == set(TOPS)


def test_what_catches_everything_raises_it_again() -> None:
    """A bare `except`, or one of `BaseException`, only undoes and raises again."""
    hiding = [
        f"{path}:{handler.lineno}"
        for path in files(*PACKAGES)
        for handler in _handlers(path)
        if handler.type is None or _catches(handler, "BaseException")
        if not any(isinstance(node, ast.Raise) for node in ast.walk(handler))
    ]
    assert hiding == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_has_a_readme_of_a_page(package: str) -> None:
    """Every package says what it knows, in at most a page."""
    folders = [
        path.parent for path in files(package) if path.name == "__init__.py" and path != Path("kvstore/__init__.py")
    ]
    missing = [str(folder) for folder in folders if not (ROOT / folder / "README.md").exists()]
    assert missing == []
    long = [str(folder) for folder in folders if len((ROOT / folder / "README.md").read_text().splitlines()) > 60]
    assert long == []


def test_tests_use_public_names() -> None:
    """A test that reads or replaces a private name breaks when only the inside changes: no file gains one."""
    seen = Counter(str(path) for path in files("tests") for node in ast.walk(tree(path)) for _ in _private_names(node))
    assert {path: count for path, count in seen.items() if count > PRIVATE_ACCESSES.get(path, 0)} == {}


def test_nothing_is_left_unfinished() -> None:
    """No file that is kept carries a mark of unfinished work, or a path of somebody's machine."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    pattern = re.compile(
        "|".join(rf"\b{re.escape(word)}\b" if word.isalpha() else re.escape(word) for word in FORBIDDEN)
    )
    found = []
    for name in filter(None, listed.decode().split("\0")):
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".yml", ".txt", "") and path.is_file():
            text = path.read_text(errors="ignore")
            found += [f"{name}: {match.group()}" for match in pattern.finditer(text)]
    assert found == []


def _private_names(node: ast.AST) -> list[str]:
    """Private names that a test reads from another object, imports, or replaces by `monkeypatch`."""
    names: list[str] = []
    if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
        is_public = ast.unparse(node) == "os._exit" or node.attr == "_replace"  # the latter is of each named tuple
        names = [] if is_public else [node.attr]
    elif isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names]
    elif (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("setattr", "delattr")
    ):
        texts = [one.value for one in node.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        names = [text.rpartition(".")[2] for text in texts]
    return [name for name in names if name.startswith("_") and not name.startswith("__")]


def _handlers(path: Path) -> list[ast.ExceptHandler]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.ExceptHandler)]


def _catches(handler: ast.ExceptHandler, name: str) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id == name for kind in caught)


def _tool(name: str, *arguments: str) -> None:
    command = [str(Path(sys.executable).parent / name), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
