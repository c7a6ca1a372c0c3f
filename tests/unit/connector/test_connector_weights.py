"""The weights id: equal for equal files, another for any other, and a cache that can cost time but never truth."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from connector import weights
from connector.prefix_hash import AdapterRequest, UncacheableContent
from connector.sglang.engine import Engine, find_hub, identify_weights, read_engine
from connector.weights import (
    Adapters,
    are_unchanged,
    digest_model,
    digest_weights,
    find_adapter_files,
    find_weight_files,
    find_weights_id,
    stamp_weights,
)
from kvstore.errors import InvalidRequest
from kvstore.runtime.meters import Meters
from tests.unit.connector.support import make_facts

CONTENT = {"a.safetensors": b"first" * 1000, "b.safetensors": b"second" * 1000}


def folder(path: Path, content: dict[str, bytes] | None = None) -> Path:
    path.mkdir(parents=True)
    for name, data in (CONTENT if content is None else content).items():
        (path / name).write_bytes(data)
    return path


def digest(path: Path, cache: Path) -> str:
    return digest_model(str(path), "auto", cache)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that are read from here on."""
    read, real = [], weights._digest_file

    def counted(file: Path) -> str:
        read.append(file.name)
        return real(file)

    monkeypatch.setattr(weights, "_digest_file", counted)
    return read


def test_digest_is_frozen(tmp_path: Path, cache: Path) -> None:
    """The id is SHA-256 over each name's length, name and content digest: it must not change between releases."""
    expected = hashlib.sha256()
    for name, data in CONTENT.items():
        expected.update(len(name).to_bytes(4, "little") + name.encode() + hashlib.sha256(data).digest())
    assert digest(folder(tmp_path / "model"), cache) == expected.hexdigest()


def test_says_that_it_reads(tmp_path: Path, cache: Path) -> None:
    """Once for files whose digests are not all known; then neither a file is read nor the cache written."""
    files, said = find_weight_files(str(folder(tmp_path / "model"))), list[str]()
    own = digest_weights(files, cache, lambda: said.append("one"))
    written = (cache / "weights.json").stat()
    assert digest_weights(files, cache, lambda: said.append("other")) == own and said == ["one"]
    assert (cache / "weights.json").stat().st_mtime_ns == written.st_mtime_ns


def test_place_and_order_of_files_do_not_matter(tmp_path: Path, cache: Path) -> None:
    """Two copies in different folders, written in different order, are the same weights."""
    one = folder(tmp_path / "one")
    other = folder(tmp_path / "deep" / "other", dict(reversed(CONTENT.items())))
    assert digest(one, cache) == digest(other, cache)


def test_anything_else_matters(tmp_path: Path, cache: Path) -> None:
    """One bit, a file's name, swapped contents, a file more or less: each is other weights."""
    a, b = CONTENT["a.safetensors"], CONTENT["b.safetensors"]
    variants = [
        CONTENT,
        {"a.safetensors": bytes([a[0] ^ 1]) + a[1:], "b.safetensors": b},
        {"a.safetensors": a, "c.safetensors": b},
        {"a.safetensors": b, "b.safetensors": a},
        {"a.safetensors": a},
        {**CONTENT, "c.safetensors": b""},
        {"a.safetensors": a + b},
    ]
    found = [digest(folder(tmp_path / str(index), content), cache) for index, content in enumerate(variants)]
    assert len(set(found)) == len(variants)


def test_a_file_that_is_changed_under_its_old_date(tmp_path: Path, cache: Path) -> None:
    """Tools that keep dates (`rsync --inplace --times`, `cp -p`) change content and nothing else that `ls` shows."""
    model = folder(tmp_path / "model")
    before, file = digest(model, cache), model / "a.safetensors"
    dates = file.stat()
    file.write_bytes(b"other" * 1000)
    while file.stat().st_ctime_ns == dates.st_ctime_ns:  # a clock that ticks every few ms
        os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    assert digest(model, cache) != before


def test_only_weights_are_digested(tmp_path: Path, cache: Path) -> None:
    """Files beside the weights do not change the id; safetensors are preferred over a second form of the weights."""
    before = digest(folder(tmp_path / "one"), cache)
    more = {**CONTENT, "config.json": b"{}", "README.md": b"x", "pytorch_model.bin": b"the same, pickled"}
    assert digest(folder(tmp_path / "two", more), cache) == before
    files = find_weight_files(str(folder(tmp_path / "three", {"m.bin": b"1", "n.pt": b"2", "x.txt": b"3"})))
    assert [file.name for file in files] == ["m.bin", "n.pt"]


def test_a_single_file_is_a_model(tmp_path: Path) -> None:
    """A GGUF model is one file."""
    file = folder(tmp_path / "model", {"m.gguf": b"x"}) / "m.gguf"
    assert find_weight_files(str(file)) == [file]


def test_a_gguf_model_may_have_parts(tmp_path: Path) -> None:
    """vLLM is told the first one and reads all; parts of another model in the folder are not its own."""
    names = [f"m[4]-0000{number}-of-00002.gguf" for number in (1, 2)]
    path = folder(tmp_path / "model", {**dict.fromkeys([*names, "n-00001-of-00002.gguf"], b"x")})
    assert [file.name for file in find_weight_files(str(path / names[0]))] == names


def index(*names: str) -> bytes:
    """An index of safetensors that names these files."""
    return json.dumps({"weight_map": {f"weight.{number}": name for number, name in enumerate(names)}}).encode()


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("content", "others", "is_equal"),
    [
        (CONTENT, {INDEX: index(*CONTENT)}, True),  # it names all
        (CONTENT, {INDEX: index("a.safetensors")}, False),
        ({**CONTENT, INDEX: index("a.safetensors")}, {INDEX: index("b.safetensors")}, False),
        (CONTENT, {INDEX: b"no index"}, False),
    ],
)
def test_an_index_chooses_files(
    content: dict[str, bytes], others: dict[str, bytes], is_equal: bool, tmp_path: Path, cache: Path
) -> None:
    """vLLM reads the files that an index names: equal files with other indexes are other weights."""
    one, two = folder(tmp_path / "one", content), folder(tmp_path / "two", {**content, **others})
    assert (digest(one, cache) == digest(two, cache)) is is_equal


def test_the_load_format_chooses_files(tmp_path: Path, cache: Path) -> None:
    """A folder with two forms of the weights: which one is read depends on the format. It does not with one form."""
    formats = ("auto", "mistral", "safetensors")
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two", {**CONTENT, "consolidated.safetensors": b"third"})
    own = folder(tmp_path / "own", {"consolidated.safetensors": b"third"})
    assert [len({digest_model(str(path), name, cache) for name in formats}) for path in (one, own, two)] == [1, 1, 3]
    pickled = folder(tmp_path / "pickled", {"m.bin": b"1", "n.pt": b"2"})
    assert digest_model(str(pickled), "npcache", cache) != digest_model(str(pickled), "pt", cache)


def test_parts_from_other_models_count(tmp_path: Path, cache: Path) -> None:
    """A model whose language model is in another folder (Ultravox): that folder's weights are its weights."""
    model, text = folder(tmp_path / "model"), folder(tmp_path / "text", {"t.safetensors": b"one"})
    facts = make_facts(model_path=str(model), part_paths=(str(text),))
    first = find_weights_id(facts, cache)
    (text / "t.safetensors").write_bytes(b"other")
    assert len({first, find_weights_id(facts, cache), digest(model, cache)}) == 3
    with pytest.raises(InvalidRequest, match="set weights_id"):
        find_weights_id(make_facts(model_path=str(model), part_paths=("org/text",)), cache)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_weights_that_are_replaced_at_the_start_have_no_id(kind: str, tmp_path: Path, cache: Path) -> None:
    """The engine has the old ones: their pages must not get the id of the new ones, which are there when it is made."""
    old, new = folder(tmp_path / "old"), folder(tmp_path / "new", {**CONTENT, "a.safetensors": b"other" * 1000})
    current = tmp_path / "current"
    current.symlink_to(old)
    facts = make_facts(model_path=str(current), weights_stamp=stamp_weights([str(current)], "auto"))
    assert find_weights_id(facts, cache) == digest(old, cache)
    assert are_unchanged(facts) and not are_unchanged(make_facts(model_path=str(current)))

    def replace_weights() -> None:
        if kind == "file":
            os.replace(new / "a.safetensors", old / "a.safetensors")
        else:
            current.unlink()
            current.symlink_to(new)

    with pytest.raises(InvalidRequest, match="changed while the engine started"):
        find_weights_id(facts, tmp_path / "empty", replace_weights)
    with pytest.raises(InvalidRequest, match="changed while the engine started"):
        find_weights_id(facts, cache)
    assert not are_unchanged(facts)  # also if it reads them again later


@pytest.mark.parametrize("replaced", ["model", "draft"])
def test_weights_of_sglang_that_are_replaced_have_no_id(
    replaced: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model and of its draft model. The ranks of a machine wait for each other for minutes before they read."""
    paths = {name: folder(tmp_path / name) for name in ("model", "draft")}
    sglang = Engine("0.5.23", str(paths["model"]), draft_path=str(paths["draft"]))
    found = identify_weights(sglang, None, cache)
    assert found["weights_id"] == found["draft_weights_id"] == digest(paths["model"], cache)

    def digest_others(path: str, load_format: str, cache_folder: Path) -> str:
        (paths[replaced] / "a.safetensors").write_bytes(b"others")
        return digest_model(path, load_format, cache_folder)

    monkeypatch.setattr("connector.sglang.engine.digest_model", digest_others)
    with pytest.raises(InvalidRequest, match="changed while they were read"):
        identify_weights(sglang, None, cache)


def test_revisions_of_a_hub_are_other_weights_of_sglang(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang was started with one of two revisions that are on this machine, or with a folder for downloads, which has
    weights of another one and no configuration: none is taken for another."""
    hub, downloads = tmp_path / "hub" / "models--some--model", tmp_path / "downloads" / "models--some--model"
    for place, commit, content in ((hub, "a", b"1"), (hub, "b", b"2"), (downloads, "a", b"3")):
        folder(place / "snapshots" / (commit * 40), {"a.safetensors": content})
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text("a" * 40)
    for commit, content in (("a", "{}"), ("b", '{"rope_theta": 2}')):
        (hub / "snapshots" / (commit * 40) / "config.json").write_text(content)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.parent))

    def found(**engine: Any) -> tuple[str, ...]:
        fields = identify_weights(Engine("0.5.23", "some/model", draft_path="some/model", **engine), None, cache)
        names = ("weights_id", "model_config_id", "draft_weights_id", "draft_config_id")
        return tuple(fields[name] for name in names)

    main, other = found(), found(revision="b" * 40, draft_revision="b" * 40)
    assert found(revision="main") == main and not set(main) & set(other)
    assert found(draft_revision="b" * 40) == main[:2] + other[2:]
    downloaded = found(download_dir=str(downloads.parent))
    assert downloaded[1::2] == main[1::2] and downloaded[0] not in (main[0], other[0])
    assert found(revision="b" * 40, draft_revision="b" * 40, download_dir=str(downloads.parent)) == other
    with pytest.raises(InvalidRequest, match="set weights_id"):
        found(revision="c" * 40)


def test_other_files_of_sglang_ask_for_an_id(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has some of its weights from elsewhere: equal files in the model's folder say nothing of them."""
    arguments = SimpleNamespace(model_path=str(folder(tmp_path / "model")), kt_weight_path="/elsewhere")
    model_config = SimpleNamespace(is_multimodal=False)
    in_effect = SimpleNamespace(resolved_server_args_dict=lambda: vars(arguments))
    context = SimpleNamespace(get_context=lambda: in_effect, process_model_config=lambda: model_config)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(sys.modules, "sglang.version", SimpleNamespace(__version__="0.5.23"))
    with pytest.raises(InvalidRequest, match=r"set weights_id.*kt_weight_path"):
        identify_weights(read_engine(), None, cache)
    assert identify_weights(read_engine(), "mine", cache)["weights_id"] == "mine"
    arguments.kt_weight_path = None
    assert identify_weights(read_engine(), None, cache)["weights_id"] == digest(tmp_path / "model", cache)
    for name, value in (("checkpoint_engine_wait_weights_before_ready", True), ("weight_cache_mode", "client")):
        setattr(arguments, name, value)
        with pytest.raises(InvalidRequest, match=f"set weights_id.*{name}"):
            identify_weights(read_engine(), None, cache)
        delattr(arguments, name)
    arguments.weight_cache_mode = "off"
    assert identify_weights(read_engine(), None, cache)["weights_id"] == digest(tmp_path / "model", cache)


def test_settings_of_sglang_are_those_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was given stays as it was: it decided on a backend itself, and has read another model's weights since."""
    given = {"model_path": "/first", "load_format": "auto", "attention_backend": None, "weight_version": "default"}
    changed = {"model_path": "/second", "load_format": "safetensors", "attention_backend": "fa3", "weight_version": "2"}
    in_effect = SimpleNamespace(resolved_server_args_dict=lambda: given | changed)
    context = SimpleNamespace(get_server_args=lambda: SimpleNamespace(**given), get_context=lambda: in_effect)
    context.process_model_config = lambda: SimpleNamespace(is_multimodal=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(sys.modules, "sglang.version", SimpleNamespace(__version__="0.5.23"))
    engine = read_engine()
    assert (engine.model_path, engine.load_format) == ("/second", "safetensors")
    assert engine.settings == {"attention_backend": "fa3", "weight_version": "2"}


def test_the_other_hub_has_other_weights_of_sglang(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SGLANG_USE_MODELSCOPE a name never stands for what another hub's cache holds under it."""
    place, paths = tmp_path / "hub" / "models--some--model", [folder(tmp_path / "other", {"a.safetensors": b"2"})]
    paths.append(folder(place / "snapshots" / ("a" * 40), {"a.safetensors": b"1"}))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    client = SimpleNamespace(snapshot_download=lambda name, **_: str(paths[0]))
    monkeypatch.setitem(sys.modules, "modelscope", client)
    found = []
    for uses_other in (True, False):
        variable = SimpleNamespace(get=lambda value=uses_other: value)
        envs = SimpleNamespace(envs=SimpleNamespace(SGLANG_USE_MODELSCOPE=variable))
        monkeypatch.setitem(sys.modules, "sglang.srt.environ", envs)
        found.append(identify_weights(Engine("0.5.23", "some/model", hub=find_hub()), None, cache)["weights_id"])
    assert found == [digest(path, cache) for path in paths]


@pytest.mark.parametrize("content", [{}, {"config.json": b"{}"}, None])
def test_no_weights_asks_for_an_id(tmp_path: Path, content: dict[str, bytes] | None) -> None:
    """Without files (a name of a hub, an empty folder) the operator has to set weights_id."""
    model = tmp_path / "model" if content is None else folder(tmp_path / "model", content)
    with pytest.raises(InvalidRequest, match="set weights_id") as refusal:
        find_weight_files(str(model))
    assert str(model) in str(refusal.value)


def test_second_start_reads_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing changed the digests come from the cache."""
    model = folder(tmp_path / "model")
    first = digest(model, cache)
    read = count_reads(monkeypatch)
    assert digest(model, cache) == first
    assert read == []


def test_a_changed_file_is_read_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another time, or another inode under the same name, size and time, and only that file is read again."""
    model = folder(tmp_path / "model")
    first, read = digest(model, cache), count_reads(monkeypatch)
    file = model / "a.safetensors"
    stat = file.stat()
    file.write_bytes(CONTENT["a.safetensors"][::-1])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    second = digest(model, cache)
    assert (second != first, read) == (True, ["a.safetensors"])
    replacement = model / "new"
    replacement.write_bytes(CONTENT["a.safetensors"])
    os.utime(replacement, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    os.replace(replacement, file)
    assert (digest(model, cache), read) == (first, ["a.safetensors"] * 2)


def test_a_file_replaced_while_it_is_read(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes behind the reader's back must not be known by the digest of what it was."""
    model, real = folder(tmp_path / "model"), weights._digest_file
    new = b"other" * 1000

    def replaced_meanwhile(file: Path) -> str:
        found = real(file)
        if file.name == "a.safetensors":
            file.write_bytes(new)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(weights, "_digest_file", replaced_meanwhile)
        digest(model, cache)
    fresh = digest(folder(tmp_path / "fresh", {**CONTENT, "a.safetensors": new}), tmp_path / "empty")
    assert digest(model, cache) == fresh


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", "values", "\udcff"])
def test_a_damaged_cache_is_ignored(tmp_path: Path, cache: Path, damage: str) -> None:
    """With any content of the cache's file, the id is that of the files, and the next start has a good cache again."""
    model = folder(tmp_path / "model")
    first = digest(model, cache)
    file = cache / "weights.json"
    known = json.loads(file.read_text())
    if damage == "values":
        damage = json.dumps(dict(zip(known, ["not hex", 5], strict=True)))
    file.write_bytes(damage.encode(errors="surrogateescape"))
    assert digest(model, cache) == first
    assert json.loads(file.read_text()) == known


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """No place for the cache costs time, not the id."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    model = folder(tmp_path / "model")
    assert digest(model, blocked / "cache") == digest(model, tmp_path / "good")


def test_the_cache_leaves_no_litter(tmp_path: Path, cache: Path) -> None:
    """Only the cache's own file stays in its folder."""
    digest(folder(tmp_path / "model"), cache)
    assert [file.name for file in cache.iterdir()] == ["weights.json"]


def test_a_full_disk_is_not_littered(tmp_path: Path, cache: Path) -> None:
    """Each adapter and each start would leave a file there, and its cache is not written all the same."""
    model, limits = folder(tmp_path / "model"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # no file of this process may get longer
    try:
        digest(model, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(cache.iterdir()) == []


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


async def test_files_that_changed_before_the_first_digest(adapters: Adapters, tmp_path: Path) -> None:
    """vLLM has read them for a prompt too short to be cached: what it holds is not what the files say now."""
    path = str(write_adapter(tmp_path / "a", b"old"))
    request = AdapterRequest(1, path, weights.adapter_identities(path))
    assert await adapters.digest_of(replace(request, number=2))
    write_adapter(tmp_path / "a", b"new")
    for _ in range(2):
        with pytest.raises(UncacheableContent, match="changed"):
            await adapters.digest_of(request)


async def test_equal_files_written_anew(adapters: Adapters, tmp_path: Path) -> None:
    """A copy over a copy changes nothing but times: the engine holds this content."""
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
    """A digest of half the old and half the new file is wrong; it is not kept, and the next request may succeed."""
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
