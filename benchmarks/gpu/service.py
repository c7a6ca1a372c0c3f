"""Stage 5: whole ranks. Blocks are saved through a real service process and loaded from its memory into other blocks.

The worker side is the connector's own, with facts written down here instead of read from vLLM: a hybrid of 27 billion
parameters (16 attention layers, 48 recurrent ones, blocks of 784 tokens), and one of eight ranks of Llama 3 70B.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.ceilings import to_device_gb_s
from benchmarks.gpu.kit import GB, Kit
from connector.device.gpu import StreamDevice

if TYPE_CHECKING:
    from connector.settings import ConnectorSettings

__all__ = ["Model", "Rank", "hybrid", "rank_on", "run"]

NEEDED = ("msgpack", "pydantic", "rich", "typer", "uvloop", "xxhash", "zstandard")
"""What the service is made with."""

_WAIT_S = 60.0
_LOADS = 7


def run(kit: Kit) -> None:
    """Both models, each with a service and a rank of its own."""
    for name in NEEDED:
        importlib.import_module(name)
    from benchmarks.node import Node, temporary_folder

    for model, compression in product((hybrid(kit), _llama(kit)), ("planes", "tiles", "none")):
        kit.progress(f"{model.name}: {model.num_bytes / GB:.2f} GB in {model.num_tokens} tokens, {compression}")
        with (
            temporary_folder() as folder,
            Node(folder, "service", memory_bytes=2 * model.num_bytes + (256 << 20)) as node,
            rank_on(kit, model, node.url, compression=compression) as rank,
        ):
            rank.fill()
            rank.save()
            rank.load()


@dataclass
class Model:
    """A model's cache on one rank, as far as the connector cares.

    Attributes:
        name: For people.
        num_tokens: Of the prompt.
        block_tokens: Of a block in every group.
        page_bytes: Of a block in one layer, padding included.
        attention: Layers, heads and channels of a token, in bfloat16.
        states: Recurrent layers, and the shapes and types of a state's parts; none: 0.
        num_blocks: Of the cache.
        tables: For each of vLLM's groups the prompt's blocks, where it is computed and where it is loaded to; the null
            block where a recurrent group has none.
    """

    name: str
    num_tokens: int
    block_tokens: int
    attention: tuple[int, int, int]
    states: int = 0
    state_shapes: tuple[tuple[int, ...], ...] = ()
    state_dtypes: tuple[str, ...] = ()
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    num_blocks: int = 0

    def __post_init__(self) -> None:
        layers, heads, channels = self.attention
        self.page_bytes = self.block_tokens * heads * channels * 2
        self.feeds = self.states // layers  # recurrent groups with as many layers as the one with attention
        self.num_spans = self.num_tokens // self.block_tokens
        used = 2 * (self.num_spans + self.feeds)
        self.num_blocks = 1 + used + 8 * (1 + self.feeds)  # and some for the check at start
        # in no order, as an engine that has run for a while hands its blocks out
        ids = (1 + torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(1))).tolist()
        for where in ("source", "target"):
            tables = [[0] * (self.num_spans - 1) + [ids.pop()] for _ in range(self.feeds)]
            self.tables[where] = [*tables, [ids.pop() for _ in range(self.num_spans)]]

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Of each part of a state."""
        sizes = {"bfloat16": 2, "float32": 4}
        return tuple(
            torch.Size(shape).numel() * sizes[dtype]
            for shape, dtype in zip(self.state_shapes, self.state_dtypes, strict=True)
        )

    @property
    def num_bytes(self) -> int:
        """Content of the prompt."""
        layers, heads, channels = self.attention
        return self.num_tokens * layers * heads * channels * 2 + self.states * sum(self.part_bytes)

    def facts(self) -> Any:
        """What the connector would read of such an engine."""
        from connector.facts import CellFacts, EngineFacts, GroupFacts, StateFacts
        from kvstore.model.kinds import FullAttention, Recurrent

        layers, heads, channels = self.attention
        names = tuple(f"layers.{number}.attn" for number in range(layers))
        cells = CellFacts(heads, heads, channels // 2, channels // 2, 2, "bfloat16")
        groups = [
            GroupFacts(
                FullAttention(), (names,), (0,) * layers, (self.feeds,), self.block_tokens, cells, {"cell": "token"}
            )
        ]
        if self.states:
            states = StateFacts(self.state_shapes, self.state_dtypes, self.part_bytes, True)
            names = tuple(f"layers.{number}.state" for number in range(self.states))
            feeds = tuple(number // layers for number in range(self.states))
            groups.insert(
                0, GroupFacts(Recurrent(), (names,), feeds, tuple(range(self.feeds)), self.block_tokens, states)
            )
        return EngineFacts(
            model_path="none",
            architecture=self.name,
            model_config={},
            compute_dtype="bfloat16",
            quantization="none",
            cache_dtype="auto",
            device="cuda",
            scheduler_block_tokens=self.block_tokens,
            num_blocks=self.num_blocks,
            tp_rank=0,
            tp_size=1,
            groups=tuple(groups),
            unsupported=None,
            load_failure_policy="recompute",
        )

    def layers(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """vLLM's views of one allocation, which attention and recurrent layers share: LBNHC."""
        layers, heads, channels = self.attention
        views, layer_bytes = {}, self.num_blocks * self.page_bytes
        for number in range(layers):
            views[f"layers.{number}.attn"] = torch.as_strided(
                memory.view(torch.bfloat16),
                (self.num_blocks, heads, self.block_tokens, channels),
                (self.page_bytes // 2, channels, heads * channels, 1),
                number * layer_bytes // 2,
            )
        size = sum(self.part_bytes)
        for number in range(self.states):
            views[f"layers.{number}.state"] = torch.as_strided(
                memory, (self.num_blocks, 1, 1, size), (self.page_bytes, size, size, 1), number % layers * layer_bytes
            )
        return views


def hybrid(kit: Kit) -> Model:
    return Model(
        "hybrid of 27B",
        num_tokens=kit.sized(10_976, 7 * 64),
        block_tokens=kit.sized(784, 64),
        attention=(kit.sized(16, 2), kit.sized(4, 2), 512),
        states=kit.sized(48, 6),
        state_shapes=kit.sized(((3, 10_240), (48, 128, 128)), ((3, 512), (2, 64, 128))),
        state_dtypes=("bfloat16", "float32"),
    )


def _llama(kit: Kit) -> Model:
    tokens = kit.sized(131_072, 2_048)
    if kit.is_gpu:  # twice on the GPU, and twice in the service
        room = min(torch.cuda.mem_get_info(kit.device)[0] // 3, kit.machine()["memory_gib"] * (1 << 30) // 6)
        while tokens * 40_960 > room:
            tokens //= 2
    return Model("Llama 70B, one rank of 8", num_tokens=tokens, block_tokens=16, attention=(kit.sized(80, 2), 1, 256))


class Rank:
    """A worker side and its store."""

    def __init__(self, kit: Kit, model: Model, bridge: Any, settings: ConnectorSettings) -> None:
        from connector.identity import CacheShape, describe_namespace, read_shape
        from connector.prefix_hash import PrefixChain
        from connector.worker.side import WorkerSide
        from kvstore.api import Deadline

        self._kit, self._model, self._bridge = kit, model, bridge
        self._name = f"{model.name}, {settings.compression}"
        self._deadline = Deadline.after
        facts = model.facts()
        shape = read_shape(facts)
        if not isinstance(shape, CacheShape):
            raise AssertionError(f"the model has no pages: {shape}")
        self._shape = shape
        chain = PrefixChain(model.block_tokens)
        chain.extend(range(model.num_tokens + 1))
        self._boundaries = tuple(chain.boundaries)
        memory = kit.streams.device_memory(model.attention[0] * model.num_blocks * model.page_bytes)
        self._views = model.layers(memory)
        self._batch_bytes = (settings.pinned_bytes or 0) // 4
        self.side = WorkerSide(settings, facts, shape, bridge, num_cores=kit.machine()["cores"])
        with kit.clock() as taken:
            self.side.register(lambda names: [self._views[name] for name in names])
        if self.side.refusal is not None:
            raise AssertionError(f"the rank is refused: {self.side.refusal}")
        kit.tell(f"{self._name}: start", seconds=taken[0], pinned_bytes=settings.pinned_bytes)
        self._namespace = bridge.open_namespace(
            describe_namespace(facts, shape, "none"), deadline=self._deadline(_WAIT_S)
        )

    def fill(self) -> None:
        """Fill the prompt's blocks with what activations look like, the same each time."""
        generator = torch.Generator(device=self._kit.device).manual_seed(1)
        for name, where in self._blocks("source"):
            view = self._views[name]
            noise = torch.randn(
                view[where].numel() * view.element_size() // 2, generator=generator, device=view.device
            ).to(torch.bfloat16)
            view[where] = noise.view(view.dtype).view(view[where].shape)

    def save(self) -> None:
        """Save all pages of the prompt, in steps that fit."""
        from connector.jobs import StepJobs

        failed: set[int] = set()
        saver = self.side.saver
        assert saver is not None
        started_s = time.perf_counter()
        for jobs in self._steps():
            self.side.save(StepJobs(saves=tuple(jobs)))
            if not saver.drain(_WAIT_S):
                raise AssertionError("saves did not end in time")
            report = self.side.take_report()
            failed |= report.saves_failed if report is not None else set()
        taken_s = time.perf_counter() - started_s
        if failed:
            raise AssertionError(f"{len(failed)} pages were not saved: {self.side.meters.snapshot()}")
        self._kit.tell(
            f"{self._name}: save",
            bytes=self._model.num_bytes,
            milliseconds=taken_s * 1e3,
            gb_s=self._model.num_bytes / taken_s / GB,
        )

    def _blocks(self, where: str) -> Iterator[tuple[str, list[int]]]:
        """For each layer the blocks that hold its part of the prompt."""
        tables = self._model.tables[where]
        for group in self._shape.groups:
            for name, feed in zip(group.facts.layer_names, group.facts.feeds, strict=True):
                yield name, [block for block in tables[group.facts.feed_groups[feed]] if block]

    def _steps(self) -> Iterator[list[Any]]:
        """All save jobs, as many at a time as there is host memory for."""
        from connector.jobs import SaveJob

        tables, block_tokens = self._model.tables["source"], self._model.block_tokens
        batch: list[SaveJob] = []
        batch_bytes = job_id = 0
        for index, group in enumerate(self._shape.groups):
            page_tokens = self._shape.layout.page_tokens
            starts: Sequence[int] = range(0, self._model.num_tokens, page_tokens)
            if group.is_state:
                starts = [self._model.num_tokens]
            for start in starts:
                stop = min(start + page_tokens, self._model.num_tokens)
                first, last = (start // block_tokens, stop // block_tokens) if start < stop else (-1, None)
                ids = tuple(tuple(tables[feed][first:last]) for feed in group.facts.feed_groups)
                prefix = self._boundaries[stop // block_tokens - 1].prefix
                job = SaveJob(job_id, self._namespace, prefix, index, start, stop, ids)
                num_bytes = group.facts.rank_block_bytes * job.num_blocks
                if batch and batch_bytes + num_bytes > self._batch_bytes:
                    yield batch
                    batch, batch_bytes = [], 0
                batch.append(job)
                batch_bytes += num_bytes
                job_id += 1
        yield batch

    def load(self) -> None:
        """Load the prompt into other blocks some times, each beside nothing, and compare."""
        model, times = self._model, []
        self.wait_registered()
        for number in range(_LOADS):
            times.append(self.load_once(self.prepare(f"request {number}")))
        self.check()
        ceiling_gb_s = to_device_gb_s(self._kit, min(model.num_bytes, 1 << 30))
        gb_s = model.num_bytes / statistics.median(times) / GB
        self._kit.tell(
            f"{self._name}: load",
            bytes=model.num_bytes,
            first_ms=times[0] * 1e3,
            milliseconds=statistics.median(times) * 1e3,
            gb_s=gb_s,
            ceiling_gb_s=ceiling_gb_s,
            share=gb_s / ceiling_gb_s,
            in_place_share=self.side.meters.get("connector_loaded_in_place_bytes") / (_LOADS * model.num_bytes),
        )

    def wait_registered(self) -> None:
        """Return when the GPU can read all that has been saved, in place."""
        from connector.jobs import StepJobs

        async def shared_memory(store: Any) -> Any:
            return store.shared_memory()

        self.side.begin_step(StepJobs())  # from the first step on it is registered, as the service touches it
        loader = self.side.loader
        if loader is not None and isinstance(loader.device, StreamDevice):
            loader.device.adopt(self._bridge.submit(shared_memory).result(_WAIT_S))
            if not loader.device.registered.wait(_WAIT_S):
                raise AssertionError("the service's memory is not registered in time")

    def check(self) -> None:
        """Compare the blocks that the prompt was loaded to with those that it was saved from.

        Raises:
            AssertionError: They differ.
        """
        wrong = [
            name
            for (name, source), (_, target) in zip(self._blocks("source"), self._blocks("target"), strict=True)
            if not torch.equal(*(self._views[name][where].view(torch.uint8) for where in (source, target)))
        ]
        if wrong:
            raise AssertionError(f"{len(wrong)} layers do not hold what was saved, first {wrong[0]}")

    def prepare(self, request_id: str) -> Any:
        """Stage the prompt, and plan its load to other blocks."""
        from connector.jobs import LoadJob, StepJobs
        from connector.scheduler.plans import plan_load
        from kvstore.api import PrefixQuery

        model = self._model
        query = PrefixQuery(self._namespace, self._boundaries, 0, model.num_tokens, model.block_tokens)
        staged = self._bridge.stage(query, deadline=self._deadline(_WAIT_S))
        if staged.resume_tokens != model.num_tokens or staged.lease is None:
            raise AssertionError(f"the prompt does not resume: {staged.resume_tokens} of {model.num_tokens} tokens")
        pieces = plan_load(
            staged,
            self._shape.groups,
            model.tables["target"],
            local_tokens=0,
            resume_tokens=model.num_tokens,
        )
        return StepJobs(loads=(LoadJob(request_id, staged.lease, pieces),))

    def load_once(self, jobs: Any) -> float:
        """Load what `prepare` returned; returns how many seconds that took."""
        from kvstore.api import LeaseId

        started_s = time.perf_counter()
        self.side.begin_step(jobs)
        self.side.start_loads(jobs)
        finished: set[str] = set()
        while not finished and time.perf_counter() - started_s < _WAIT_S:
            finished, failed = self.side.take_results(may_wait=True)
            if failed:
                raise AssertionError("the load failed; its reason is logged")
        taken_s = time.perf_counter() - started_s
        self._bridge.release(LeaseId(jobs.loads[0].lease))
        if not finished:
            raise AssertionError(f"the load did not end in {_WAIT_S} s")
        return taken_s


@contextmanager
def rank_on(kit: Kit, model: Model, url: str, *, compression: str = "planes") -> Iterator[Rank]:
    """A rank on a store of its own at `url`, as an engine's ranks have one; both are closed at the end."""
    from connector.settings import ConnectorSettings

    settings = ConnectorSettings(
        url=url, pinned_bytes=kit.sized(1 << 30, 64 << 20), compression=compression, stall_timeout_ms=10_000
    )
    with settings.connect("gpu kit", None, saves=True) as bridge:
        bridge.wait_ready(deadline=_deadline())
        rank = Rank(kit, model, bridge, settings)
        try:
            yield rank
        finally:
            rank.side.shutdown()


def _deadline() -> Any:
    from kvstore.api import Deadline

    return Deadline.after(_WAIT_S)
