"""Who may import whom, and what must not be needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import FOLDERS, PACKAGES, ROOT, files, imports, imports_of, tree

REDIS_HOME = ("kvstore/tiers/redis/", "kvstore/catalog/redis/")
S3_HOME = ("kvstore/tiers/s3/",)
TESTING = ("kvstore/testing/", "benchmarks/")  # the latter compares our tiers with the usual clients

HOMES = {
    "redis": (*REDIS_HOME, *TESTING),
    "hiredis": (*REDIS_HOME, *TESTING),
    "aioboto3": (*S3_HOME, *TESTING),
    "aiobotocore": (*S3_HOME, *TESTING),
    "boto3": TESTING,
    "botocore": (*S3_HOME, *TESTING),
    "vllm": (
        *("connector/vllm/connector.py", "connector/vllm/engine_facts.py"),
        # what vLLM shows of us, in vLLM's own types
        *(
            "connector/vllm/observability.py",
            "connector/plugin.py",
        ),
        *("connector/vllm/blending.py", "connector/vllm/blend_layers.py"),
        *("connector/vllm/engine_calls.py", "connector/vllm/weight_changes.py"),
        *("connector/offloading/engine.py", "connector/offloading/tier.py"),
        "connector/vllm/model_files.py",  # which hub it uses
        *("connector/vllm/contract.py", "connector/vllm/inert.py"),  # only to look whether vLLM has what the others use
        *("kvstore/testing/engine/main.py", "kvstore/testing/engine/traffic.py"),
    ),
    "sglang": ("connector/sglang/backend.py",),
    "cryptography": ("kvstore/format/encrypted.py", "benchmarks/"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn"), ("kvstore/service/admin/", "demo/")),
    "transformers": ("kvstore/testing/checkpoints.py", "benchmarks/blend_model.py"),
    "torch": (
        *("connector/vllm/connector.py", "connector/vllm/engine_facts.py", "connector/worker/", "connector/device/"),
        *("connector/blend/", "connector/vllm/blend", "benchmarks/blend.py", "benchmarks/blend_model.py"),
        *("connector/sglang/", "connector/vllm/requests.py", "benchmarks/gpu/", "benchmarks/ordering.py"),
        "benchmarks/without_amx.py",
        *("kvstore/testing/checkpoints.py", "kvstore/testing/engine/main.py", "kvstore/testing/engine/fork_server.py"),
    ),
    "numba": (),
    "llvmlite": ("benchmarks/lmcache_beside_vllm.py",),
    "migrations": ("migrations/", "kvstore/cli/migrate.py"),
}

# Beside the public packages: what of `runtime` carries no policy, a counter, a clock, memory and threads of a process.
CONNECTOR_MAY_IMPORT = (
    *("api", "model", "format", "codec", "errors", "client", "runtime.meters", "runtime.clock", "runtime.sizes"),
    *("runtime.arena", "runtime.buffers", "runtime.machine", "runtime.instruments"),
)


def test_layers() -> None:
    """import-linter finds every package in its layer, and every import pointing down."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", HOMES)
def test_foreign_packages_have_one_home(name: str) -> None:
    """Redis, S3, torch and vLLM are imported only where they belong; numba, which breaks vLLM's start, nowhere."""
    seen = imports_of((name,), *PACKAGES)[name]
    assert [str(path) for path in seen if not str(path).startswith(tuple(HOMES[name]))] == []


def test_the_connector_sees_the_public_surface_only() -> None:
    """What the connector imports of kvstore is what anybody may import."""
    allowed = tuple(f"kvstore.{name}" for name in CONNECTOR_MAY_IMPORT)
    seen = [
        f"{path}:{line} {module}"
        for path in files("connector")
        for module, line, _ in imports(path)
        if module.split(".")[0] == "kvstore" and not any(module == a or module.startswith(a + ".") for a in allowed)
    ]
    assert seen == []


def test_cuda_is_touched_in_one_folder() -> None:
    """`torch.cuda` is spelled under `connector/device/` alone, and in the kit that measures what is beneath it."""
    seen = [
        str(path)
        for path in files(*PACKAGES)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr == "cuda"
    ]
    assert [path for path in seen if not path.startswith(("connector/device/", "benchmarks/gpu/"))] == []


def test_the_testing_package_imports_heavy_things_late() -> None:
    """`kvstore.testing` ships with the store: importing it asks for neither torch nor vLLM nor transformers."""
    seen = [
        f"{path}:{line} {module}"
        for path in files("kvstore/testing")
        for module, line, at_import in imports(path)
        if module.split(".")[0] in ("torch", "vllm", "transformers") and at_import
    ]
    # the checkpoint writer names torch's types, for a type checker only
    assert [entry for entry in seen if not entry.startswith("kvstore/testing/checkpoints.py")] == []


def test_no_module_imports_a_test() -> None:
    """What tests share has a module of its own: a reader finds it there, and no collected module is loaded twice."""
    counts = Path("tests/fuzz/test_zz_number_of_inputs.py")  # what the fuzz plans, which is known once it is imported
    seen = [
        f"{path}:{node.lineno} {name}"
        for path in files(*FOLDERS)
        if path != counts
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", None) or "", *(alias.name for alias in node.names))
        if any(part.startswith("test_") for part in name.split("."))
    ]
    assert seen == []


WITHOUT_EXTRAS = """
import asyncio, sys

class Blocked:
    names = {"redis", "hiredis", "aioboto3", "aiobotocore", "boto3", "botocore", "moto"}
    names |= {"fastapi", "starlette", "uvicorn", "cryptography"}
    names |= {"torch", "vllm", "transformers", "numba", "llvmlite"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
import kvstore.cli.main, kvstore.service.main, kvstore.testing.checkpoints, kvstore.testing.engine
from kvstore.compose import open_store
from kvstore.runtime.deadline import Deadline
from kvstore.settings import load_settings

async def main():
    settings = load_settings({"cold": "file://" + sys.argv[1], "memory_bytes": "16MiB", "disk_bytes": "16MiB"})
    async with open_store(settings) as store:
        print(sorted((await store.status(deadline=Deadline.after(5.0)))["tiers"]))

asyncio.run(main())
"""


def test_the_embedded_store_needs_no_extras(tmp_path: Path) -> None:
    """A store over memory and a directory opens where Redis, S3 clients, torch and vLLM cannot be imported."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS, str(tmp_path / "records")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "memory" in done.stdout
