"""What a fresh engine restores is, bit for bit, what an engine without connector resumes from its own cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.names import parse_name
from kvstore.format.record import read_record
from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.engine import Answer, EngineProcess, EngineSpec, seeded_prompt
from tests.connector.conftest import RESTORED, ask_each
from tests.connector.support.service import DirectoryService

pytestmark = pytest.mark.engine

Start = Callable[[EngineSpec], EngineProcess]


def spec(llama: Path, cache: Path, **changes: object) -> EngineSpec:
    values: dict[str, object] = {
        "checkpoint": llama,
        "connector": {"url": "embedded:", "memory_bytes": "256MiB", "disk_bytes": "1GiB"},
        "environment": {"XDG_CACHE_HOME": str(cache)},
    }
    return EngineSpec(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("multiprocess", [False, True], ids=["in-process", "multi-process"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_restored_runs_equal_local_hits(
    runner: str,
    multiprocess: bool,
    llama: Path,
    prompts: list[tuple[int, ...]],
    references: Callable[[str, bool], list[Answer]],
    engine: Start,
    tmp_path: Path,
) -> None:
    """An engine saves three prompts, a fresh one resumes them: tokens and top-20 logprobs equal a local hit's exactly.

    Compared within one form, since engines of the two forms differ by some 1e-5 even without a connector.
    """
    saving = engine(spec(llama, tmp_path, runner=runner, multiprocess=multiprocess))
    computed = ask_each(saving, prompts)
    assert [answer.num_cached_tokens for answer in computed] == [0, 0, 0]
    saving.stop()
    fresh = engine(spec(llama, tmp_path, runner=runner, multiprocess=multiprocess))
    restored = ask_each(fresh, prompts)
    fresh.stop()
    assert [answer.num_cached_tokens for answer in restored] == list(RESTORED)
    local = references(runner, multiprocess)
    assert [mine.difference(other) for mine, other in zip(restored, local, strict=True)] == [0.0, 0.0, 0.0]
    assert all(mine.tokens == cold.tokens for mine, cold in zip(restored, computed, strict=True))


def tail_file(records: Path, slice_: int) -> Path:
    """The file of a prompt's last record."""
    found = {
        read_record(file.read_bytes()).header.span.stop: file
        for file in records.rglob("*.g0.s*")
        if parse_name(str(file.relative_to(records))).slice == slice_
    }
    return found[max(found)]


def flip_exponent_bit(record: bytes) -> bytes:
    """Flip the lowest bit of one number's exponent: in the second plane of fp32, which is stored as it is."""
    header = read_record(record).header
    numbers = header.decoded_bytes // 4
    at = len(record) - 3 * numbers + numbers // 2
    assert at > HEADER_BYTES + 16
    return record[:at] + bytes([record[at] ^ 0x80]) + record[at + 1 :]


def test_a_flipped_bit_is_a_miss_and_would_be_wrong_output(
    llama: Path,
    prompts: list[tuple[int, ...]],
    references: Callable[[str, bool], list[Answer]],
    engine: Start,
    tmp_path: Path,
) -> None:
    """One flipped bit on disk shortens the hit and changes nothing; with verification off it changes the output."""
    prompt, reference = prompts[0], references("v1", False)[0]
    with DirectoryService(tmp_path) as service:
        saving = engine(EngineSpec(checkpoint=llama, connector={"url": service.url}))
        (computed,) = ask_each(saving, [prompt])
        saving.stop()
        service.stop()

        file = tail_file(service.records, slice_=1)
        flipped = flip_exponent_bit(file.read_bytes())
        file.write_bytes(flipped)
        service.start()
        restoring = engine(EngineSpec(checkpoint=llama, connector={"url": service.url}))
        (restored,) = ask_each(restoring, [prompt])
        restoring.stop()
        assert restored.num_cached_tokens == 2048  # the page before the damaged tail
        assert restored.tokens == computed.tokens
        assert service.status()["tiers"]["filesystem"]["num_quarantined"] == 1
        assert not file.exists()
        service.stop()

    file.write_bytes(flipped)
    with DirectoryService(tmp_path, verifies=False) as service:
        fooled = engine(
            EngineSpec(
                checkpoint=llama, connector={"url": service.url}, preload=("tests.connector.support.unverified",)
            )
        )
        (wrong,) = ask_each(fooled, [prompt])
        assert wrong.num_cached_tokens == 2432
        assert wrong.difference(reference) > 0.0


def test_an_unsupported_model_is_left_alone(work: Path, engine: Start, tmp_path: Path) -> None:
    """A model with windows runs as without us: equal output, no hits, one warning with the reason."""
    gemma = write_checkpoint("gemma3", work / "checkpoints")
    prompt = seeded_prompt(7, 700)
    plain = ask_each(engine(EngineSpec(checkpoint=gemma)), [prompt, prompt])
    beside = engine(spec(gemma, tmp_path))
    answers = ask_each(beside, [prompt, prompt])
    assert [mine.difference(other) for mine, other in zip(answers, plain, strict=True)] == [0.0, 0.0]
    assert beside.log_text().count("this engine is not cached") == 1
    assert "only one full-attention group is supported yet" in beside.log_text()
