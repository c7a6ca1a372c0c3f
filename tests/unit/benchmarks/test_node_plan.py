"""What a node can load and save: the arithmetic, and whether it describes this machine."""

from __future__ import annotations

import io
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import node_plan
from benchmarks.node_model import Costs, NodeShape, event_loops_for, settings_of, token_bytes_of, ways_of
from connector.settings import ConnectorSettings
from kvstore.settings import Settings
from kvstore.testing.checkpoints import CHECKPOINTS

COSTS = Costs(stored_ratio=0.75, encode=0.5, load=0.5, send=0.2, take=0.2, put=0.2, get=0.2)
NODE = NodeShape(gpus=8, cores=64, gpu_link_gb_s=55.0, network_gb_s=12.0, token_bytes=131_072)


def test_the_lowest_limit_counts() -> None:
    """Each way has the limit of its narrowest part, in bytes of KV, of which fewer are stored."""
    memory, redis, save, put = ways_of(NODE, COSTS)
    assert (memory.lowest.part, memory.lowest.gb_s) == ("cores", 128.0)
    assert (redis.lowest.part, redis.lowest.gb_s) == ("the service's event loop", pytest.approx(1 / 0.15))
    assert {limit.part: limit.gb_s for limit in redis.limits}["network"] == pytest.approx(16.0)
    assert {limit.part: limit.gb_s for limit in save.limits}["cores"] == pytest.approx(64 / 0.8)
    assert put.lowest.gb_s == pytest.approx(1 / 0.3)


def test_the_report_names_only_settings_that_there_are() -> None:
    """What the line calls settings can be set: in the connector, or in the service."""
    shown = io.StringIO()
    console = Console(width=200, file=shown)
    line, failures = node_plan.report((NODE, COSTS, [node_plan.Check("put", 1.0, 1.0)]), console)
    (seen,) = json.loads(line.removeprefix("BENCH "))
    known = {*(one.name for one in fields(ConnectorSettings)), *Settings.model_fields}
    assert failures == [] and seen["settings"].keys() <= known
    assert seen["event_loops_needed"] == 3
    assert "one event loop moves the bytes; 3 would be needed" in shown.getvalue()


def test_event_loops_that_are_no_limit() -> None:
    """With as many as are named another part limits loads from Redis, with one fewer they do."""
    loops = event_loops_for(NODE, COSTS)
    assert loops == 3
    for count, part in ((loops, "network"), (loops - 1, "the service's event loop")):
        shape = NodeShape(8, 64, 55.0, 12.0, 131_072, event_loops=count)
        assert ways_of(shape, COSTS)[1].lowest.part == part


def test_settings() -> None:
    """`pinned_bytes` is the connector's default on a GPU; `memory_bytes` holds two prompts for each GPU."""
    settings = settings_of(NODE, COSTS)
    assert settings == {"pinned_bytes": 1 << 30, "memory_bytes": 16 << 30}
    small = settings_of(replace(NODE, memory_bytes=32 << 30), COSTS)
    assert small["pinned_bytes"] == (32 << 30) // 8 // 8
    few = settings_of(NodeShape(8, 64, 55.0, 12.0, 131_072, gpus_per_model=8), COSTS)
    assert few == {"pinned_bytes": 512 << 20, "memory_bytes": 2 << 30}


def test_the_kv_of_a_token() -> None:
    """By the fields of a model's config: full attention, only some layers, latent."""
    sizes = {name: token_bytes_of(checkpoint.full_config()) for name, checkpoint in CHECKPOINTS.items()}
    assert sizes["llama"] == 2 * 4 * 4 * 32 * 4
    assert sizes["gptoss"] == 2 * 2 * 2 * 32 * 4
    assert sizes["qwen3next"] == 2 * 1 * 2 * 64 * 2
    deepseek = next(
        checkpoint.full_config() for checkpoint in CHECKPOINTS.values() if "kv_lora_rank" in checkpoint.config
    )
    rank, rope = deepseek["kv_lora_rank"], deepseek["qk_rope_head_dim"]
    assert token_bytes_of(deepseek) == deepseek["num_hidden_layers"] * (rank + rope) * 4


def test_a_model_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag and the file are named, before anything is measured."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(SystemExit):
            node_plan.main(["--model", str(folder)])
        assert "--model" in capsys.readouterr().err


@pytest.mark.full  # costs of bytes change while other tests run beside it
@pytest.mark.servers
def test_the_plan_describes_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole ways through a service and a Redis cost what their parts do, within a third: processor time, which other
    work of the machine changes little."""
    pytest.importorskip("torch")
    assert node_plan.main(["--gpus", "1", "--json"]) == 0
    word, _, line = capsys.readouterr().out.splitlines()[-1].partition(" ")
    assert word == "BENCH"
    (seen,) = json.loads(line)
    assert len(seen["ways"]) == 4 and all(way["gb_s"] > 0 for way in seen["ways"])
    assert {check["what"] for check in seen["checks"]} == {"service redis put", "service redis get"}
    for check in seen["checks"]:
        assert 2 / 3 <= check["ratio"] <= 3 / 2, check
