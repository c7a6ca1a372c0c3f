"""The GPU kit on a machine without a GPU: every stage runs in any folder; its recorded layouts are those of vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from benchmarks.gpu import contract
from benchmarks.gpu.__main__ import STAGES
from benchmarks.gpu.contract import NUM_BLOCKS, NUM_LAYERS, RECORDED, Recorded
from benchmarks.gpu.kit import Kit
from connector.device import gpu, lanes

ROOT = Path(__file__).resolve().parents[3]
HAS_GPU = torch.cuda.is_available()

BARE = """
import sys

class Blocked:
    names = {"vllm", "pytest", "hypothesis", "msgpack", "zstandard", "xxhash", "uvloop"}
    names |= {"pydantic", "rich", "typer", "redis", "transformers"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_kit(folder: Path, *arguments: str, path: Path | None = None) -> tuple[int, dict[str, Any], str]:
    """Exit status, the file, and stderr."""
    out = folder / "gpu.json"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [path or ROOT, ROOT]))}
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(out.read_text()), done.stderr


def results(report: dict[str, Any], stage: str) -> dict[str, dict[str, Any]]:
    return {result["name"]: result for result in report["stages"][stage]["results"]}


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: run the kit itself")
def test_a_bare_machine(tmp_path: Path) -> None:
    """With torch and numpy alone four stages run and report, the others name the package they need; no stage fails."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    status, report, log = run_kit(tmp_path, path=tmp_path)
    assert status == 0, log
    seen = {name: stage["status"] for name, stage in report["stages"].items()}
    needs = {"service": "needs msgpack", "exactness": "needs vllm", "first_token": "needs vllm"}
    assert seen == {**dict.fromkeys(STAGES, "ok, no GPU"), **needs}
    assert report["machine"]["gpu"] is None
    skipped = [
        result["name"]
        for stage in report["stages"].values()
        for result in stage["results"]
        if result.get("skipped") == "no GPU"
    ]
    assert len(skipped) == 4 + 1 + 1  # memory files; orders left out; beside a matmul
    assert results(report, "ceilings")["both at once"]["gb_s"] > 0
    layouts = results(report, "contract")
    assert {name for name in layouts if layouts[name]["equal"]} >= {
        layout.name for layout in RECORDED if "hybrid" not in layout.name
    }
    assert len(layouts) == len(RECORDED)  # two of which are checked together, and a large one
    assert results(report, "order")["no wrong bytes"]["loaded"] > 0
    threads = [result["threads"] for result in report["stages"]["copies"]["results"] if "threads" in result]
    assert threads == [1, 2, 4, 8, 16] * 2


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: run the kit itself")
def test_whole_ranks(tmp_path: Path) -> None:
    """Both models, compressed and not, are saved through a service process and loaded from it, equal bit for bit."""
    status, report, log = run_kit(tmp_path, "--stages", "service")
    assert (status, list(report["stages"])) == (0, ["service"]), log
    found = results(report, "service")
    for model in ("hybrid of 27B, planes", "hybrid of 27B, none", "Llama 70B, one rank of 8, planes"):
        assert found[f"{model}: save"]["bytes"] == found[f"{model}: load"]["bytes"] > 0
        assert found[f"{model}: load"]["share"] > 0


@pytest.mark.parametrize("whole_group", [False, True])
def test_interrupted(tmp_path: Path, whole_group: bool) -> None:
    """Ctrl-C ends the kit and its stage at once, also if only the kit's own process gets it; the file has the stages'
    states."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--stages", "order,copies"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as kit:
        assert kit.stderr is not None
        kit.stderr.readline()  # the stage runs
        (os.killpg if whole_group else os.kill)(kit.pid, signal.SIGINT)
        _, log = kit.communicate(timeout=60)
        assert kit.returncode == 130 and "interrupted" in log
    stages = json.loads(out.read_text())["stages"]
    assert (stages["order"]["status"], stages["copies"]["status"]) == ("interrupted", "not run")


def test_a_stage_that_does_not_end(tmp_path: Path) -> None:
    """It is ended at its limit and reported as failed, later ones as not run, and the file is whole."""
    status, report, log = run_kit(tmp_path, "--stages", "order,copies", "--limit-s", "0.3")
    assert status == 1, log
    assert report["stages"]["order"]["status"] == "failed"
    assert "ended after 0 s" in report["stages"]["order"]["error"]
    assert report["stages"]["copies"]["status"] == "not run: no time was left"


@pytest.mark.parametrize("broken", ["gather_rows", "scatter_rows", "split_planes"])
def test_wrong_copies_are_found(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A kernel that does nothing shows in the check of a layout."""
    layouts = [RECORDED[1]]
    assert contract.check(Kit("contract"), layouts, seed=1)
    monkeypatch.setattr(gpu if hasattr(gpu, broken) else lanes, broken, lambda *_: None)
    assert not contract.check(Kit("contract"), layouts, seed=2)


# ---- the recorded layouts

HEADS, HEAD_SIZE = 4, 64


def recorded(name: str, spec: Any, layout: KVCacheLayout, kernel_tokens: int | None = None) -> Recorded:
    """How vLLM lays the layers of a group out in one allocation."""
    layer_stride, block_stride, *_ = compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, layout)
    size = NUM_LAYERS * NUM_BLOCKS * spec.page_size_bytes
    placed = KVCacheTensor(
        size=size,
        layers=[f"layer.{number}" for number in range(NUM_LAYERS)],
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    raw = torch.zeros(size, dtype=torch.int8)
    made = create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, placed, kernel_tokens)
    views = [group_kernel_blocks(view, NUM_BLOCKS) for view in made]
    assert len({(view.shape, view.stride()) for view in views}) == 1
    return Recorded(
        name=name,
        element_bytes=views[0].element_size(),
        allocation_bytes=size,
        starts=tuple(view.storage_offset() * view.element_size() for view in views),
        shape=tuple(views[0].shape),
        stride=tuple(views[0].stride()),
    )


def attention(block_tokens: int, dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_tokens, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=dtype)


def latent(block_tokens: int, dtype: torch.dtype) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=576, dtype=dtype)


def made_by_vllm() -> tuple[Recorded, ...]:
    bf16, fp8 = torch.bfloat16, torch.uint8
    layouts = KVCacheLayout
    state = MambaSpec(
        block_size=32, shapes=((3, 96), (4, 32, 48)), dtypes=(bf16, torch.float32),
        page_size_padded=attention(32).page_size_bytes, mamba_cache_mode="align",
    )  # fmt: skip
    return (
        *(recorded(f"attention {layout.name} 16", attention(16), layout) for layout in layouts),
        *(recorded(f"attention {layout.name} 16 fp8", attention(16, fp8), layout) for layout in layouts),
        recorded("attention LBNHC 64", attention(64), layouts.LBNHC),
        recorded("attention LBNHC 64 in kernel blocks of 16", attention(64), layouts.LBNHC, 16),
        recorded("attention LBHNC 64 in kernel blocks of 16", attention(64), layouts.LBHNC, 16),
        recorded("latent 576 LBNHC 64", latent(64, bf16), layouts.LBNHC),
        recorded("latent 576 BLNHC 64", latent(64, bf16), layouts.BLNHC),
        recorded("latent 576 LBNHC 64 fp8", latent(64, fp8), layouts.LBNHC),
        recorded("hybrid attention LBNHC 32", attention(32), layouts.LBNHC),
        recorded("hybrid state LBNHC 32", state, layouts.LBNHC),
    )


def test_layouts_are_those_of_vllm() -> None:
    """Each recorded tensor is placed, shaped and strided as vLLM's own view of such a cache."""
    assert made_by_vllm() == RECORDED
