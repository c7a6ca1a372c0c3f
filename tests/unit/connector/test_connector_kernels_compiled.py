"""What a GPU does with records itself, compiled for GPUs by Triton's own compiler, which needs none. The interpreter
takes programs that no GPU does, and says nothing of registers and wide loads.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")

_BYTES, _INTS, _LONGS, _INT = "*u8", "*i32", "*i64", "i32"
_SOURCE = {"source": _BYTES, "decoded_bytes": _INT, "num_tiles": _INT}
_PLANNED = {"codes": _INTS, "plan": _LONGS}
_DIGESTS = {"memory": _LONGS, "table": _LONGS, "sums": _LONGS, "known": _LONGS}
_ROWS = {"cache": _LONGS, "pages": _LONGS, "table": _LONGS, "num_words": _INT}


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched.

    Attributes:
        kernel: Its module and name.
        arguments: Their types. Memory that is not in `unaligned` is at multiples of 16 bytes.
        constants: Arguments that each have a kernel of their own.
        wide: How many loads and stores of 16 bytes it must have at least: those of a page and of its payload.
    """

    kernel: str
    arguments: Mapping[str, str]
    constants: Mapping[str, int] = field(default_factory=dict)
    unaligned: tuple[str, ...] = ()
    num_warps: int = 4
    wide: tuple[int, int] = (0, 0)


CASES = [
    Case(
        "tile_kernels.decode_kernel",
        {"table": _LONGS, "verdict": _INTS},
        {"GROUP": 1, "NATIVE": True},
        unaligned=("verdict",),
        wide=(3, 4),
    ),
    Case("tile_kernels.survey_kernel", {**_SOURCE, "sums": _LONGS, "counts": _INTS}, {"GROUP": 1}, wide=(4, 0)),
    Case(
        "tile_kernels.choose_table_kernel",
        {"counts": _INTS, "sums": _LONGS, "num_tiles": _INT, **_PLANNED},
        {"CHUNK": 1024},
        num_warps=8,
    ),
    Case("tile_kernels.count_kernel", {**_SOURCE, **_PLANNED, "patches": _INTS}, {"GROUP": 1}, wide=(4, 0)),
    Case(
        "tile_kernels.choose_slots_kernel",
        {
            "patches": _INTS,
            "decoded_bytes": _INT,
            "num_tiles": _INT,
            "room": _INT,
            "plan": _LONGS,
            "whole": _INTS,
            "target": _BYTES,
            "result": _INTS,
        },
        {"CHUNK": 1024},
        unaligned=("result",),
    ),
    Case(
        "tile_kernels.write_kernel",
        {
            **_SOURCE,
            **_PLANNED,
            "sums": _LONGS,
            "patches": _INTS,
            "whole": _INTS,
            "target": _BYTES,
            "result": _INTS,
        },
        {"GROUP": 1},
        unaligned=("result",),
        wide=(8, 8),
    ),
    Case("checksums._sum_blocks", _DIGESTS, {"BLOCKS": 16}),
    Case("checksums._digest", {**_DIGESTS, "verdict": _INTS}, {"UNROLLED": 16}, unaligned=("verdict",), num_warps=1),
    Case("row_kernels.copy_rows_kernel", _ROWS, {"TO_CACHE": True, "ROWS": 32, "WORDS": 64}),
    Case("row_kernels.copy_rows_kernel", _ROWS, {"TO_CACHE": False, "ROWS": 32, "WORDS": 64}),
]


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel."""

    num_bytes: int
    num_registers: int
    stack_bytes: int
    wide: tuple[int, int]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """Triton decides when it is imported whether it interprets, and other tests import it too."""
    context, cache = multiprocessing.get_context("spawn"), tmp_path_factory.mktemp("compiled")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_compile, initargs=(str(cache),)) as process:
        yield process


def _compile(cache: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"  # no kernel has floats; unset, Triton warns


@pytest.mark.parametrize(
    "capability",
    [pytest.param(80, marks=pytest.mark.full), 90, pytest.param(100, marks=pytest.mark.full)],
    ids=["A100", "H100", "B200"],
)
def test_kernels_compile(process: ProcessPoolExecutor, capability: int, tell: Callable[[str], None]) -> None:
    """Each has registers enough, and those that read or write whole pages do it 16 bytes at a time."""
    for case in CASES:
        seen = process.submit(_compiled, case, capability).result()
        tell(f"{case.kernel} for {capability}: {seen.num_registers} registers, {seen.num_bytes} bytes")
        assert seen.num_registers > 0
        assert seen.stack_bytes == 0, case
        assert seen.wide[0] >= case.wide[0], case
        assert seen.wide[1] >= case.wide[1], case


def _compiled(case: Case, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = case.kernel.split(".")
    kernel: Any = getattr(importlib.import_module(f"connector.device.{module}"), name)
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={one: case.arguments.get(one, "constexpr") for one in names},
        constexprs={(names.index(one),): value for one, value in case.constants.items()},
        attrs={
            (names.index(one),): [["tt.divisibility", 16]]
            for one, kind in case.arguments.items()
            if kind.startswith("*") and one not in case.unaligned
        },
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": case.num_warps})
    assembly, binary = made.asm["ptx"], made.asm["cubin"]
    registers, stack = _resources(binary)
    loads, stores = (len(re.findall(rf"{verb}\.global\S*\.v4\.b32", assembly)) for verb in ("ld", "st"))
    return Compiled(len(binary), registers, stack, (loads, stores))


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: what finds no register is kept there, which is slow."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])
