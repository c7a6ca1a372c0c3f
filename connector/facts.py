"""The facts of an engine, as plain values without vLLM's types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.model.kinds import GroupKind


@dataclass(frozen=True, slots=True)
class CellFacts:
    """What one layer of an attention group keeps of a token: per head a key and a value, or one latent vector.

    Attributes:
        rank_heads: Heads in this rank's blocks.
        total_heads: Heads of the whole model; a latent vector is one head that every rank holds.
        head_size: Channels of a key, or of the latent vector.
        head_size_v: Channels of a value; 0 for a latent vector.
        element_bytes: Bytes of one cache element of type `dtype`.
    """

    rank_heads: int
    total_heads: int
    head_size: int
    head_size_v: int
    element_bytes: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """One token of one head in one layer."""
        return (self.head_size + self.head_size_v) * self.element_bytes


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What one layer of a recurrent group keeps on this rank, e.g. the convolution's window and the state proper.

    Attributes:
        replicated: Every rank holds the whole state. Otherwise each rank holds its own share.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    part_bytes: tuple[int, ...]
    replicated: bool

    @property
    def num_bytes(self) -> int:
        """One layer's state on this rank."""
        return sum(self.part_bytes)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the largest part; the codec is chosen for it."""
        elements = 1
        for extent in self.shapes[self._largest]:
            elements *= extent
        return self.part_bytes[self._largest] // max(1, elements)

    @property
    def dtype(self) -> str:
        """The type of such an element, as torch spells it."""
        return self.dtypes[self._largest]

    @property
    def _largest(self) -> int:
        return self.part_bytes.index(max(self.part_bytes))


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One canonical group: all layers of one kind and one spec, in the order of the model.

    Attributes:
        kind: Which records make a boundary resumable.
        stages: The names of the layers of each pipeline stage; one stage without a pipeline.
        feeds: For each layer on this rank the index in `feed_groups` of its block table.
        feed_groups: vLLM's groups of the layers of all stages, ascending.
        block_tokens: Tokens of a block of these groups.
        content: What a layer keeps.
        packing: On what the bytes inside a block depend, e.g. backend and instruction set; part of the namespace.
        drafts: The layers of a draft model (EAGLE, MTP). Their cell of a block's last token depends on the next token,
            which the block's prefix hash does not cover. A wrong draft costs acceptance; the target model verifies it.
        stage: This rank's stage.
    """

    kind: GroupKind
    stages: tuple[tuple[str, ...], ...]
    feeds: tuple[int, ...]
    feed_groups: tuple[int, ...]
    block_tokens: int
    content: CellFacts | StateFacts
    packing: Mapping[str, str | int] = field(default_factory=dict)
    drafts: bool = False
    stage: int = 0

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers on this rank."""
        return self.stages[self.stage]

    @property
    def most_layers(self) -> int:
        """Layers of the stage with most layers."""
        return max(map(len, self.stages))

    @property
    def rank_block_bytes(self) -> int:
        """Content of one block (or state) of all layers on one rank, in the stage with most layers."""
        if isinstance(self.content, StateFacts):
            return self.most_layers * self.content.num_bytes
        return self.most_layers * self.block_tokens * self.content.rank_heads * self.content.token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What an engine computes, as its settings say on any process.

    Attributes:
        model_config: The model's configuration as plain JSON, floats as text.
        compute_dtype: Type of the activations.
        quantization: vLLM's name of the weight quantisation, or `none`.
        cache_dtype: vLLM's name of the cache type.
        device: `cpu` or `cuda`.
        load_format: vLLM's: how it reads weights, and whether from the model's files.
        part_paths: Folders of weights of parts of the model that are not in its own.
        weights_stamp: Of the weight files before the engine read them, or of a hub's once it had; empty: not known.
        draft_path: Folder of a draft model's own weights.
        model_rules: Settings in use that change what the model computes, beside its configuration.
        adapter_rules: Settings in use that change what an adapter does.
        media_rules: Settings in use that change how media items are processed.
        untested_release: The version of a vLLM that was not tested with this connector; else `None`.
    """

    model_path: str
    architecture: str
    model_config: Mapping[str, Any]
    compute_dtype: str
    quantization: str
    cache_dtype: str
    device: str
    load_format: str = "auto"
    part_paths: tuple[str, ...] = ()
    weights_stamp: str = ""
    draft_path: str | None = None
    model_rules: Mapping[str, Any] = field(default_factory=dict)
    adapter_rules: Mapping[str, str] = field(default_factory=dict)
    media_rules: Mapping[str, Any] = field(default_factory=dict)
    untested_release: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts(ModelFacts):
    """One engine. Pickles: ranks send theirs to the scheduler side.

    Attributes:
        scheduler_block_tokens: Hits end on multiples of this; a multiple of every group's block.
        num_blocks: Blocks of the engine's cache.
        tp_rank: This rank of its pipeline stage (0 on the scheduler side).
        groups: The canonical groups, in the order of their first layer; empty if the model is not supported.
        unsupported: Why this engine cannot be cached, or `None`.
        load_failure_policy: vLLM's `kv_load_failure_policy`.
        prefix_caching: vLLM caches prefixes itself, so that one request's load serves the next one.
        retention_tokens: vLLM's `prefix_cache_retention_interval`.
        pp_size: Pipeline stages.
        step_tokens: Most tokens that the engine computes in a step.
        machine_bytes: Memory of the rank's machine, or of its container; 0: not known.
        machine_ranks: Ranks of all engines of this deployment on that machine.
        worker_extension: The class that an operator adds to vLLM's worker; empty: none.
        steps_together: Data-parallel engines of this model make their steps together: one that waits delays all.
    """

    scheduler_block_tokens: int
    num_blocks: int
    tp_rank: int
    tp_size: int
    groups: tuple[GroupFacts, ...]
    unsupported: str | None
    load_failure_policy: str
    prefix_caching: bool = True
    retention_tokens: int | None = None
    pp_size: int = 1
    step_tokens: int = 0
    machine_bytes: int = 0
    machine_ranks: int = 1
    worker_extension: str = ""
    steps_together: bool = False

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is in the last stage of its pipeline; all groups have equal stages."""
        return all(group.stage == len(group.stages) - 1 for group in self.groups)

    @property
    def num_ranks(self) -> int:
        """All of them answer each load and save."""
        return self.tp_size * self.pp_size
