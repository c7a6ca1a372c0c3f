"""The benchmark of the device, on a model that takes no time; no figure is judged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import device
from benchmarks.measure import Ceiling
from connector.device.copy import StreamDevice
from connector.device.cpu import CpuCopier
from connector.device.streams import InlineStreams


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of two layers and two heads."""
    for name, value in (("NUM_LAYERS", 2), ("NUM_HEADS", 2), ("HEAD_BYTES", 32)):
        monkeypatch.setattr(device, name, value)
    monkeypatch.setattr(device, "has_gpu", lambda: False)


def rows(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    assert device.main(["--total-bytes", "64KiB", "--repetitions", "1", *flags]) == 0
    word, _, line = capsys.readouterr().out.splitlines()[-1].partition(" ")
    assert word == "BENCH"
    return json.loads(line)


def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Both directions in both layouts, a scatter on one thread and on several, each beside memcpy."""
    found = rows(capsys, "--json", "--threads", "3")
    kinds = [(row["what"], row["in_flight"]) for row in found]
    assert kinds == [
        (f"{what} {layout} cpu", threads)
        for layout in ("LBHNC", "LBNHC")
        for what, threads in (("gather", 1), ("scatter", 1), ("scatter", 3))
    ]
    assert {row["ceiling"] for row in found} == {"memcpy"}
    assert {row["size_bytes"] for row in found} == {2 * 256 * 32}


def test_on_streams(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would run, on host memory: the ring, the lanes and their ceiling."""
    monkeypatch.setattr(device, "open_device", lambda where, **sizes: StreamDevice(InlineStreams(), **sizes))
    ceilings: list[bool] = []

    def ceiling(self: device.Pages, *, to_host: bool) -> Ceiling:
        ceilings.append(to_host)
        return device.pinned_memcpy(InlineStreams(), self.num_bytes, to_host=to_host)

    monkeypatch.setattr(device.Pages, "ceiling", ceiling)
    assert {row["ceiling"] for row in rows(capsys)} == {"pinned memcpy"}
    assert ceilings == [True, False, False] * 2


def test_copies_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scatter that writes nothing ends the benchmark: no figure of it is shown."""
    monkeypatch.setattr(CpuCopier, "scatter", lambda *_: None)
    with pytest.raises(RuntimeError, match="does not hold"):
        device.main(["--total-bytes", "64KiB", "--repetitions", "1"])
