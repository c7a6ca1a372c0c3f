"""Adapters are what their files hold, and nobody is told a digest of files that the engine may not have read."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from connector import weights
from connector.prefix_hash import AdapterRequest, UncacheableContent
from connector.weights import Adapters, find_adapter_files
from kvstore.errors import InvalidRequest
from kvstore.runtime.meters import Meters


def write_adapter(folder: Path, content: bytes = b"weights", config: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


@pytest.fixture
def adapters(tmp_path: Path) -> Adapters:
    return Adapters(tmp_path / "cache", {}, Meters())


async def test_content_counts_and_nothing_else(adapters: Adapters, tmp_path: Path) -> None:
    """Copies under other numbers and paths are equal; another weight or config is another adapter."""
    digests = {}
    for number, (name, content, config) in enumerate(
        [("a", b"x", "{}"), ("deep/b", b"x", "{}"), ("c", b"y", "{}"), ("d", b"x", '{"r": 8}')], 1
    ):
        path = write_adapter(tmp_path / name, content, config)
        digests[name] = await adapters.digest_of(AdapterRequest(number, str(path)))
    assert digests["a"] == digests["deep/b"]
    assert len(set(digests.values())) == 3
    assert {len(digest) for digest in digests.values()} == {32}


async def test_rules_of_the_engine_count(tmp_path: Path) -> None:
    """An engine that applies an adapter to fewer modules has another adapter."""
    request = AdapterRequest(1, str(write_adapter(tmp_path / "a")))
    found = [
        await Adapters(tmp_path, rules, Meters()).digest_of(request)
        for rules in (None, {}, {"target_modules": "q_proj"}, {"target_modules": "v_proj"})
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 3


async def test_files_that_change_are_not_cached_any_more(adapters: Adapters, tmp_path: Path) -> None:
    """vLLM may hold the old weights or read the new ones: the number is refused, also when the old files return."""
    request = AdapterRequest(1, str(write_adapter(tmp_path / "a", b"old")))
    digest = await adapters.digest_of(request)
    write_adapter(tmp_path / "a", b"new")
    for content in (b"new", b"old"):
        write_adapter(tmp_path / "a", content)
        with pytest.raises(UncacheableContent, match="changed") as caught:
            await adapters.digest_of(request)
        assert caught.value.reason == "adapter_changed"
    write_adapter(tmp_path / "a", b"old")
    assert await adapters.digest_of(AdapterRequest(2, request.path)) == digest


async def test_equal_files_written_anew(adapters: Adapters, tmp_path: Path) -> None:
    """A copy over a copy changes nothing but times: whichever the engine holds, it is this content."""
    path = write_adapter(tmp_path / "a")
    digest = await adapters.digest_of(AdapterRequest(1, str(path)))
    os.utime(path / "adapter_model.safetensors", (1, 1))
    assert await adapters.digest_of(AdapterRequest(1, str(path))) == digest


async def test_one_number_is_one_adapter(adapters: Adapters, tmp_path: Path) -> None:
    """A number that comes with another folder of other content is not believed."""
    one, other = write_adapter(tmp_path / "a", b"1"), write_adapter(tmp_path / "b", b"2")
    await adapters.digest_of(AdapterRequest(1, str(one)))
    with pytest.raises(UncacheableContent):
        await adapters.digest_of(AdapterRequest(1, str(other)))


async def test_files_that_change_while_they_are_read(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest of half the old and half the new file is nobody's; it is not kept, and the next request may succeed."""
    path = write_adapter(tmp_path / "a", b"old")
    read = weights._digest_file

    def replaced_meanwhile(file: Path) -> str:
        digest = read(file)
        write_adapter(path, b"new one")
        return digest

    monkeypatch.setattr(weights, "_digest_file", replaced_meanwhile)
    with pytest.raises(UncacheableContent, match="while they are read"):
        await adapters.digest_of(AdapterRequest(1, str(path)))
    monkeypatch.undo()
    assert await adapters.digest_of(AdapterRequest(1, str(path)))


async def test_requests_at_a_time_read_once(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty requests for one new adapter read its files once; later ones read none."""
    read = []
    real = weights._digest_file

    def counted(file: Path) -> str:
        read.append(file.name)
        return real(file)

    monkeypatch.setattr(weights, "_digest_file", counted)
    request = AdapterRequest(1, str(write_adapter(tmp_path / "a")))
    digests = await asyncio.gather(*(adapters.digest_of(request) for _ in range(20)))
    assert len(set(digests)) == 1
    assert sorted(read) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
async def test_no_adapter(adapters: Adapters, tmp_path: Path, missing: str) -> None:
    """A folder that is none, or a name of the hub, is not cached; when the files come, it is."""
    path = write_adapter(tmp_path / "a")
    (path / missing).unlink()
    for where in (str(path), "some/adapter"):
        with pytest.raises(UncacheableContent) as caught:
            await adapters.digest_of(AdapterRequest(1, where))
        assert caught.value.reason == "adapter_files"
    write_adapter(path)
    assert await adapters.digest_of(AdapterRequest(1, str(path)))


def test_files_of_an_adapter(tmp_path: Path) -> None:
    """Its config and every file of weights; a README is not what an adapter does."""
    path = write_adapter(tmp_path / "a")
    (path / "README.md").write_text("hello")
    (path / "new_embeddings.bin").write_bytes(b"more")
    names = [file.name for file in find_adapter_files(path)]
    assert names == ["adapter_config.json", "adapter_model.safetensors", "new_embeddings.bin"]
    with pytest.raises(InvalidRequest, match=r"adapter_config\.json"):
        find_adapter_files(tmp_path)
