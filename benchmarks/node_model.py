"""What a node can load and save, by arithmetic: costs of bytes on one processor, and what the node has. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from connector.memory_budget import default_pinned_bytes

__all__ = [
    "Costs",
    "Limit",
    "NodeShape",
    "Way",
    "event_loops_for",
    "read_config",
    "settings_of",
    "token_bytes_of",
    "ways_of",
]

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_PROMPTS_PER_GPU = 2
"""Hits that a service's memory should hold for each GPU: one is loaded while the next one is fetched."""
_MEMORY_SHARE = 3 / 4
"""Of a service's memory, for hits."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor seconds for a GB (10^9 bytes), all threads and the kernel's part included.

    Attributes:
        stored_ratio: Compression: stored bytes divided by KV bytes.
        encode: Of KV, in an engine.
        load: Of KV, in engine and service: verify, decode, write to the blocks.
        send: Of stored bytes, in an engine: a save to the service.
        take: Of stored bytes, in the service: receive and verify a save.
        put: Of stored bytes, in the service: to Redis.
        get: Of stored bytes, in the service: from Redis, verified.
    """

    stored_ratio: float
    encode: float
    load: float
    send: float
    take: float
    put: float
    get: float


@dataclass(frozen=True, slots=True)
class NodeShape:
    """A node.

    Attributes:
        gpus: Each with one rank.
        cores: That engines and service may use.
        gpu_link_gb_s: To and from each GPU, in 10^9 bytes a second.
        network_gb_s: To and from Redis.
        token_bytes: KV of a token, all ranks of a model together.
        gpus_per_model: Over how many GPUs a model is spread.
        step_tokens: The most tokens that an engine computes in one step.
        prompt_tokens: Of the prompts that are resumed.
        event_loops: Threads of the service that move bytes. A service has one; other numbers are for comparison.
        memory_bytes: Of the node. 0: unknown.
    """

    gpus: int
    cores: int
    gpu_link_gb_s: float
    network_gb_s: float
    token_bytes: int
    gpus_per_model: int = 1
    step_tokens: int = 8192
    prompt_tokens: int = 8192
    event_loops: int = 1
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Limit:
    """What one part of the node allows, in 10^9 bytes of KV a second."""

    part: str
    gb_s: float


@dataclass(frozen=True, slots=True)
class Way:
    """One way of KV through the node, and what each part on it allows."""

    name: str
    limits: tuple[Limit, ...]

    @property
    def lowest(self) -> Limit:
        """The part that is the limit."""
        return min(self.limits, key=lambda limit: limit.gb_s)


def ways_of(node: NodeShape, costs: Costs) -> list[Way]:
    """Loads and saves, each as if the node did nothing else."""
    stored = costs.stored_ratio
    links, network = _links(node), _network(node, costs)

    def cores(cost: float) -> Limit:
        return Limit("cores", node.cores / cost)

    def loops(cost: float) -> Limit:
        return Limit("the service's event loop", node.event_loops / (stored * cost))

    save = costs.encode + stored * (costs.send + costs.take)
    return [
        Way("load, from memory", (links, cores(costs.load))),
        Way("load, from Redis", (*_outside_the_event_loop(node, costs), loops(costs.get))),
        Way("save, to memory", (links, cores(save), loops(costs.take))),
        Way("save, to Redis", (links, network, cores(save + stored * costs.put), loops(costs.take + costs.put))),
    ]


def event_loops_for(node: NodeShape, costs: Costs) -> int:
    """With how many event loops none of them would be the limit of a load from Redis."""
    others = min(limit.gb_s for limit in _outside_the_event_loop(node, costs))
    return max(1, math.ceil(others * costs.stored_ratio * costs.get))


def _outside_the_event_loop(node: NodeShape, costs: Costs) -> tuple[Limit, ...]:
    """What every other part than the service's event loop allows a load from Redis."""
    cores = Limit("cores", node.cores / (costs.load + costs.stored_ratio * costs.get))
    return _links(node), _network(node, costs), cores


def _links(node: NodeShape) -> Limit:
    return Limit("links of the GPUs", node.gpus * node.gpu_link_gb_s)


def _network(node: NodeShape, costs: Costs) -> Limit:
    return Limit("network", node.network_gb_s / costs.stored_ratio)


def settings_of(node: NodeShape, costs: Costs) -> dict[str, int]:
    """`pinned_bytes` of each rank, which is the connector's default there, and `memory_bytes` of the node's service, in
    whole MiB.
    """
    rank_token_bytes = node.token_bytes / node.gpus_per_model
    pinned, _ = default_pinned_bytes(
        step_tokens=node.step_tokens,
        token_bytes=math.ceil(rank_token_bytes),
        on_gpu=True,
        machine_bytes=node.memory_bytes,
        machine_ranks=node.gpus,
    )
    hits = _PROMPTS_PER_GPU * node.gpus * node.prompt_tokens * rank_token_bytes * costs.stored_ratio
    return {"pinned_bytes": _whole_mib(pinned), "memory_bytes": _whole_mib(hits / _MEMORY_SHARE)}


def token_bytes_of(config: Mapping[str, object]) -> int:
    """KV bytes of a token by a model's `config.json`: of its layers with attention that keep all tokens.

    Raises:
        KeyError: A field is missing; the error names it.
    """
    text = config.get("text_config", config)
    assert isinstance(text, Mapping)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
    element_bytes = _ELEMENT_BYTES.get(dtype, 2)
    kinds = text.get("layer_types")
    num_layers = int(text["num_hidden_layers"])
    if isinstance(kinds, list):
        num_layers = sum(kind == "full_attention" for kind in kinds)
    if "kv_lora_rank" in text:
        return num_layers * (int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])) * element_bytes
    num_heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // num_heads)
    return 2 * num_layers * int(text.get("num_key_value_heads") or num_heads) * head_dim * element_bytes


def read_config(folder: Path) -> Mapping[str, object]:
    """The `config.json` of a model's folder."""
    config: Mapping[str, object] = json.loads((folder / "config.json").read_text())
    return config


def _whole_mib(num_bytes: float) -> int:
    return math.ceil(num_bytes / (1 << 20)) << 20
