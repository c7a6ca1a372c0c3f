"""Who shares pages with whom: real engines that differ in one thing each, on one store.

One engine saves, and what others find of it is what they may.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.engine import Answer, EngineFailed, EngineProcess, EngineSpec, Request, seeded_prompt
from kvstore.testing.serve import Service
from kvstore.testing.waiting import eventually
from tests.connector.support.blending import RECORDS, blended
from tests.connector.support.identity import copy_checkpoint, write_adapter, write_code, write_embeddings
from tests.connector.support.runs import start_together
from tests.connector.support.stores import PATIENT

pytestmark = pytest.mark.engine

PROMPT = seeded_prompt(901, 1300)
WHOLE = 1280
"""Where a hit on the whole prompt ends: at the last block."""

WHOLE_RECORDS = 8
"""What is saved of it: a page and a tail, in four slices each."""

TWO_PAGES = 2048
HIDDEN = 256
EXTENSION = "tests.connector.support.identity.WeightsExtension"


@dataclass(frozen=True)
class Place:
    """The service and the files that all engines here have in common.

    Attributes:
        service: Keeps records of everybody; `red` and `blue` are its tenants.
        folder: For files.
        checkpoint: The model.
    """

    service: Service
    folder: Path
    checkpoint: Path

    def spec(self, *, connector: dict[str, Any] | None = None, **changes: Any) -> EngineSpec:
        """An engine on the service; nothing but what is told differs from the one that saved."""
        extra = {"url": self.service.url, **PATIENT, **(connector or {})}
        values: dict[str, Any] = {"checkpoint": self.checkpoint, "connector": extra, "max_model_len": 4096, **changes}
        return EngineSpec(**values)

    def adapter(self, name: str, *, seed: int) -> str:
        return str(write_adapter(self.folder / name, self.checkpoint, seed=seed))

    def embeddings(self, name: str, **changes: Any) -> str:
        return str(write_embeddings(self.folder / name, 2500, HIDDEN, **changes))

    def token_file(self, tenant: str) -> str:
        return str(self.folder / f"{tenant}.token")

    def num_saved(self) -> float:
        """Records that were saved so far, by anybody."""
        self.service.settle()
        counters = self.service.status()["counters"]
        return sum(count for name, count in counters.items() if name.startswith("saves"))

    def wait_saved(self, num_records: float) -> None:
        """Return when so many were saved: an answer does not wait for the pages that it brought."""
        eventually(lambda: self.num_saved() >= num_records)


@pytest.fixture(scope="module")
def place(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("identity")
    credentials = ""
    for tenant in ("red", "blue"):
        (folder / f"{tenant}.token").write_text(f"the token of {tenant}\n")
        digest = hashlib.sha256(f"the token of {tenant}".encode()).hexdigest()
        credentials += f'[[credential]]\ntenant = "{tenant}"\ntoken_sha256 = "{digest}"\n'
    (folder / "credentials.toml").write_text(credentials)
    flags = {"memory_bytes": "512MiB", "cold": f"file://{folder / 'records'}"}
    flags["credentials_file"] = str(folder / "credentials.toml")
    with Service(folder, flags) as service:
        yield Place(service, folder, llama)


def ask(engine: EngineProcess, **changes: Any) -> Answer:
    """Answer the prompt; the engine forgets what it cached itself."""
    answer = engine.generate([Request(PROMPT, max_tokens=4, **changes)])[0]
    assert engine.reset_prefix_cache()
    return answer


WITH_ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "enable_prompt_embeds": True}


@dataclass(frozen=True)
class Shared:
    """What one engine saved, and another one that reads it.

    Attributes:
        saved: Its answers, by what was asked.
        reader: An engine that differs in everything that must not matter: hash seed, algorithm, path of the model.
    """

    saved: dict[str, Answer]
    reader: EngineProcess


@pytest.fixture(scope="module")
def shared(place: Place, work: Path) -> Iterator[Shared]:
    first, second = place.adapter("adapters/one", seed=1), place.adapter("adapters/two", seed=2)
    place.embeddings("a.pt", seed=7)
    requests: dict[str, dict[str, Any]] = {
        "plain": {},
        "salted": {"cache_salt": "red users"},
        "adapter": {"adapter": ("one", 1, first)},
        "other adapter": {"adapter": ("two", 2, second)},
        "embedded": {"embeddings": str(place.folder / "a.pt")},
    }
    environment = {"PYTHONHASHSEED": "0"}
    plain = {"enable_prompt_embeds": True, "prefix_caching_hash_algo": "sha256"}
    savers = {
        "identity-saver": place.spec(arguments=plain, environment=environment),
        "identity-saver-adapters": place.spec(arguments={**plain, **WITH_ADAPTERS}, environment=environment),
    }
    with start_together(savers, work=work) as engines:
        saved = {name: ask(engines["adapter" in request], **request) for name, request in requests.items()}
        for engine in engines:
            engine.stop()
    assert {name: answer.num_cached_tokens for name, answer in saved.items()} == dict.fromkeys(saved, 0)
    assert len({answer.tokens for name, answer in saved.items() if name != "salted"}) == 4
    reader = place.spec(
        checkpoint=copy_checkpoint(place.checkpoint, place.folder / "elsewhere"),
        arguments={**WITH_ADAPTERS, "prefix_caching_hash_algo": "sha256_cbor"},
        environment={"PYTHONHASHSEED": "5"},
    )
    with start_together({"identity-reader": reader}, work=work) as (engine,):
        yield Shared(saved, engine)


def found(shared: Shared, name: str, *, tokens: int = WHOLE, **request: Any) -> None:
    """The reader resumes what was saved under that name, and answers as the saver did."""
    answer = ask(shared.reader, **request)
    assert answer.num_cached_tokens == tokens
    assert answer.tokens == shared.saved[name].tokens
    assert answer.difference(shared.saved[name]) < 1e-3


def test_hash_seed_algorithm_and_model_path_do_not_matter(shared: Shared) -> None:
    """Saved with PYTHONHASHSEED=0 and sha256, found with 5 and sha256_cbor, by an engine with the model elsewhere."""
    found(shared, "plain")


def test_salts_are_apart(shared: Shared) -> None:
    """The same salt finds what was saved under it; another one finds nothing of the three equal prompts."""
    found(shared, "salted", cache_salt="red users")
    assert ask(shared.reader, cache_salt="blue users").num_cached_tokens == 0


def test_name_number_and_path_of_an_adapter_do_not_matter(shared: Shared, place: Place) -> None:
    """A copy of the adapter under another name, number and path is the adapter."""
    found(shared, "adapter", adapter=("renamed", 5, place.adapter("moved/one", seed=1)))


def test_another_adapter_under_an_old_name(shared: Shared, place: Place) -> None:
    """Name, number and even path of the saver's first adapter with other content find nothing, nor the second's."""
    path = place.adapter("replaced/adapters/one", seed=3)
    answer = ask(shared.reader, adapter=("one", 1, path))
    assert answer.num_cached_tokens == 0
    assert answer.tokens != shared.saved["adapter"].tokens


@pytest.mark.parametrize("first", [PROMPT, PROMPT[:40]], ids=["a prompt that is saved", "a prompt too short for it"])
def test_an_adapter_whose_files_change_is_not_cached(shared: Shared, place: Place, first: tuple[int, ...]) -> None:
    """vLLM keeps what it has read: pages of the old weights are not saved as the new files', nor those found."""
    number = 1000 + len(first)
    path = place.adapter(f"changing-{number}", seed=11)
    adapter = ("changing", number, path)
    before = shared.reader.generate([Request(first, max_tokens=4, adapter=adapter)])[0]
    assert shared.reader.reset_prefix_cache()
    other = place.adapter(f"changing-{number}-new", seed=number)
    for file in Path(path).iterdir():
        os.replace(Path(other) / file.name, file)
    after = ask(shared.reader, adapter=adapter)
    assert (before.num_cached_tokens, after.num_cached_tokens) == (0, 0)
    if first == PROMPT:
        assert after.tokens == before.tokens  # vLLM did not read the files again
    ask(shared.reader)  # whatever the engine saves is saved with its next steps
    place.num_saved()
    assert ask(shared.reader, adapter=("fresh", number + 1, path)).num_cached_tokens == 0


@pytest.mark.parametrize("overwritten", [False, True], ids=["loaded in place", "files overwritten"])
def test_an_adapter_that_is_replaced_under_a_request(shared: Shared, place: Place, *, overwritten: bool) -> None:
    """A trainer replaces its files while a request waits: what they compute gets no name of the old ones."""
    number = 21 + 2 * overwritten
    path = place.adapter(f"under a request-{number}", seed=number)
    other = place.adapter(f"under a request-{number}-new", seed=number + 1)
    asking = "__import__('tests.connector.support.identity', fromlist=['ask_while_replaced']).ask_while_replaced"
    before = place.num_saved()
    files = f"{number}, {path!r}, {other!r}, overwritten={overwritten}"
    answered = shared.reader.evaluate(f"{asking}(llm, {list(PROMPT)}, {files})")
    assert shared.reader.reset_prefix_cache()
    old = ask(shared.reader, adapter=("old", number + 1, path))
    place.wait_saved(before + WHOLE_RECORDS)  # of the old adapter, which nobody has stored before
    assert old.num_cached_tokens == 0
    assert list(old.tokens) != answered  # computed with the new files


def test_prompts_beside_adapters_are_not_saved(shared: Shared, place: Place) -> None:
    """On a CPU vLLM computes them with an adapter, in a step that has both: others would get their pages."""
    before = place.num_saved()
    for _ in range(3):
        assert ask(shared.reader, cache_salt="beside adapters").num_cached_tokens == 0
    assert place.num_saved() == before
    assert shared.reader.log_text().count("prompts without an adapter are loaded and not saved") == 1


def test_embeddings_are_content(shared: Shared, place: Place) -> None:
    """The same rows from another file are found; one changed row ends the hit at the page before it."""
    found(shared, "embedded", tokens=2432, embeddings=place.embeddings("copy.pt", seed=7))
    changed = place.embeddings("changed.pt", seed=7, changed_row=2200)
    assert ask(shared.reader, embeddings=changed).num_cached_tokens == TWO_PAGES
    assert ask(shared.reader, embeddings=place.embeddings("other.pt", seed=8)).num_cached_tokens == 0


APART: dict[str, Callable[[Place], EngineSpec]] = {
    "weights under one name": lambda at: at.spec(
        checkpoint=copy_checkpoint(at.checkpoint, at.folder / "other" / at.checkpoint.name, seed=5)
    ),
    "dtype": lambda at: at.spec(dtype="bfloat16"),
    "weights id": lambda at: at.spec(connector={"weights_id": "another"}),
    "rope settings": lambda at: at.spec(
        arguments={"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}}
    ),
    "tenant": lambda at: at.spec(connector={"token_file": at.token_file("red")}),
    "a draft model": lambda at: at.spec(  # vLLM copies the engine's configuration for it
        arguments={
            "speculative_config": {
                "method": "draft_model",
                "model": str(copy_checkpoint(at.checkpoint, at.folder / "draft", seed=3)),
                "num_speculative_tokens": 2,
            }
        }
    ),
}


@pytest.mark.parametrize("axis", APART)
def test_never_across(shared: Shared, place: Place, work: Path, axis: str) -> None:
    """An engine that differs in this alone finds nothing of the saver's, saves its own, and finds that."""
    with start_together({f"identity-{axis.replace(' ', '-')}": APART[axis](place)}, work=work) as (engine,):
        before = place.num_saved()
        first = ask(engine)
        place.wait_saved(before + WHOLE_RECORDS)
        second = ask(engine)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, WHOLE)
        assert second.tokens == first.tokens


def assert_never_meet(specs: dict[str, EngineSpec], place: Place, work: Path) -> None:
    """Of two engines, which compute different tokens, each finds what it saved, and nothing of the other."""
    with start_together(specs, work=work) as engines:
        answers = []
        for engine in engines:
            before = place.num_saved()
            answers.append(ask(engine))
            place.wait_saved(before + WHOLE_RECORDS)
            answers.append(ask(engine))
    assert [answer.num_cached_tokens for answer in answers] == [0, WHOLE, 0, WHOLE]
    first, again, other, other_again = (answer.tokens for answer in answers)
    assert first == again != other == other_again


def test_the_code_of_a_model_counts(place: Place, work: Path) -> None:
    """Two models differ in a Python file of their own alone: neither engine finds what the other saved."""
    specs = {
        f"identity-code-{share}": place.spec(
            checkpoint=write_code(place.checkpoint, place.folder / f"code-{share}", share=share),
            arguments={"model_impl": "transformers", "trust_remote_code": True},
        )
        for share in (0.0, 0.5)
    }
    assert_never_meet(specs, place, work)


def test_plugins_count(place: Place, work: Path) -> None:
    """A plugin of vLLM makes the model's classes compute something else: engines with it find nothing of others."""
    plugin = place.folder / "plugin"
    (plugin / "halved-1.0.dist-info").mkdir(parents=True)
    (plugin / "halved-1.0.dist-info" / "METADATA").write_text("Name: halved\nVersion: 1.0\n")
    (plugin / "halved-1.0.dist-info" / "entry_points.txt").write_text("[vllm.general_plugins]\nhalved = halved:halve\n")
    (plugin / "halved.py").write_text(_HALVED)
    path = os.pathsep.join(filter(None, (str(plugin), os.environ.get("PYTHONPATH"))))
    own = {"weights_id": "for plugins"}  # other tests' engines have saved the prompt
    specs = {
        "identity-plugin": place.spec(connector=own, environment={"PYTHONPATH": path}),
        "identity-no-plugin": place.spec(connector=own),
    }
    assert_never_meet(specs, place, work)


_HALVED = """
def halve():
    from vllm.model_executor.models.llama import LlamaMLP

    forward = LlamaMLP.forward
    LlamaMLP.forward = lambda self, x: forward(self, x) * 0.5
"""


def test_tenants_never_meet(shared: Shared, place: Place, work: Path) -> None:
    """What one tenant's engine saved another's does not find; an engine with a token of nobody runs uncached."""
    (place.folder / "nobody.token").write_text("made up\n")
    specs = {
        name: place.spec(connector={"token_file": place.token_file(name), "lookup_timeout_ms": 1000})
        for name in ("blue", "nobody")
    }
    with start_together({f"identity-{name}": spec for name, spec in specs.items()}, work=work) as (blue, nobody):
        before = place.num_saved()
        assert ask(blue).num_cached_tokens == 0
        place.wait_saved(before + WHOLE_RECORDS)
        assert ask(blue).num_cached_tokens == WHOLE
        for _ in range(2):
            assert ask(nobody).num_cached_tokens == 0
        assert "the token is wrong" in nobody.log_text()


@contextmanager
def changing_engine(place: Place, work: Path, *, multiprocess: bool) -> Iterator[tuple[EngineProcess, Path]]:
    """An engine whose weights may change, and the file for their ids."""
    form = "multi" if multiprocess else "single"
    id_file = place.folder / f"weights-id-{form}"
    spec = place.spec(
        connector={"weights_may_change": True, "weights_id_file": str(id_file)},
        multiprocess=multiprocess,
        arguments={"worker_extension_cls": EXTENSION},
    )
    with start_together({f"identity-changing-{form}": spec}, work=work) as (engine,):
        yield engine, id_file


@pytest.mark.parametrize("multiprocess", [False, True], ids=["in-process", "multi-process"])
def test_weights_that_change(shared: Shared, place: Place, work: Path, *, multiprocess: bool) -> None:
    """From the reset of the caches to the new id nothing is saved or loaded; then pages of the new weights alone."""
    with changing_engine(place, work, multiprocess=multiprocess) as (engine, id_file):
        old = ask(engine)
        assert (old.num_cached_tokens, old.tokens) == (WHOLE, shared.saved["plain"].tokens)
        assert engine.evaluate("llm.reset_prefix_cache(reset_connector=True)")
        before = place.num_saved()
        assert ask(engine).num_cached_tokens == 0
        engine.evaluate("llm.collective_rpc('change_weights', args=(3,))")
        new = ask(engine)
        assert new.num_cached_tokens == 0
        assert new.tokens != old.tokens
        assert place.num_saved() == before
        (place.folder / "next").write_text(f"step 1 of {id_file.name}")
        os.replace(place.folder / "next", id_file)
        assert ask(engine).num_cached_tokens == 0  # written, and not taken up yet
        assert place.num_saved() == before
        assert engine.evaluate("llm.reset_prefix_cache(reset_connector=True)")
        answers = [ask(engine)]
        place.wait_saved(before + WHOLE_RECORDS)  # the second answer comes from what the first one saved
        answers.append(ask(engine))
        assert [answer.num_cached_tokens for answer in answers] == [0, WHOLE]
        assert [answer.tokens for answer in answers] == [new.tokens] * 2
        assert place.num_saved() == before + WHOLE_RECORDS
        engine.evaluate("llm.collective_rpc('reload_weights') and None")  # without a reset before
        assert ask(engine).num_cached_tokens == 0
        assert place.num_saved() == before + WHOLE_RECORDS
    assert ask(shared.reader).tokens == shared.saved["plain"].tokens


def test_weights_from_another_folder(shared: Shared, place: Place, work: Path) -> None:
    """An engine that loads them while it runs, undeclared by its settings, saves, loads and blends nothing any more.

    It may read its own again.
    """
    other = copy_checkpoint(place.checkpoint, place.folder / "other-weights", seed=5)
    with start_together({"identity-reloaded": place.spec(connector={"blend": True})}, work=work) as (engine,):
        engine.evaluate("llm.collective_rpc('reload_weights') and None")
        old = ask(engine)
        assert (old.num_cached_tokens, old.tokens) == (WHOLE, shared.saved["plain"].tokens)
        stored = place.num_saved()
        assert engine.generate([blended((0, 1, 2))])[0].num_cached_tokens == 512
        place.wait_saved(stored + 3 * RECORDS)
        engine.evaluate(f"llm.collective_rpc('reload_weights', kwargs={{'weights_path': '{other}'}}) and None")
        engine.reset_prefix_cache()
        before = place.num_saved()
        assert engine.generate([blended((1, 0, 2))])[0].num_cached_tokens == 0  # the documents are of the old weights
        new = ask(engine)  # the load is refused, and the prompt computed
        assert new.tokens != old.tokens
        assert ask(engine, cache_salt="of the new weights").num_cached_tokens == 0
        assert "this engine does not blend: weights were loaded" in engine.log_text()
        assert "set weights_may_change" in engine.log_text()
        assert place.num_saved() == before
    assert ask(shared.reader).tokens == shared.saved["plain"].tokens


def test_weights_that_an_operators_code_changes(shared: Shared, place: Place, work: Path) -> None:
    """A method that was added to the workers does it, or code in the engine's process: undeclared, it ends caching."""
    specs = {
        "identity-extended": place.spec(multiprocess=True, arguments={"worker_extension_cls": EXTENSION}),
        "identity-reached": place.spec(),
    }
    model = "llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()"
    changes = [
        "llm.collective_rpc('change_weights', args=(3,))",
        f"{model}.load_weights([(name, weight * 2) for name, weight in {model}.named_parameters() if 'norm' in name])",
    ]
    with start_together(specs, work=work) as engines:
        for engine, change in zip(engines, changes, strict=True):
            assert ask(engine).num_cached_tokens == WHOLE
            before = place.num_saved()
            engine.evaluate(f"{change} and None")
            engine.reset_prefix_cache()
            new = ask(engine)
            assert (new.num_cached_tokens, new.tokens != shared.saved["plain"].tokens) == (0, True)
            assert ask(engine, cache_salt="of the new weights").num_cached_tokens == 0
            assert "set weights_may_change" in engine.log_text()
            assert place.num_saved() == before
    assert ask(shared.reader).tokens == shared.saved["plain"].tokens


def test_a_wrong_setting_is_named(place: Place, work: Path) -> None:
    """An engine with a misspelt setting, or a value that does not fit, does not start, and says which it is."""
    wrong = {"lookup_timeout_msec": 5, "url": "redis://localhost"}
    specs = {key: place.spec(connector={key: value}) for key, value in wrong.items()}
    for key, spec in specs.items():
        with pytest.raises(EngineFailed) as caught, ExitStack() as stack:
            stack.enter_context(start_together({f"identity-{key}": spec}, work=work))
        assert key in str(caught.value)


def test_costly_settings_are_said_once(place: Place, work: Path) -> None:
    """A hybrid engine with vLLM's defaults is told each thing that costs it hits, once, with what to set."""
    from kvstore.testing.checkpoints import write_checkpoint

    spec = place.spec(
        checkpoint=write_checkpoint("qwen3next", work / "checkpoints"), multiprocess=True, dtype="bfloat16"
    )
    transfer = dict(spec.engine_arguments()["kv_transfer_config"])
    del transfer["kv_load_failure_policy"]  # vLLM's default is to fail
    spec = replace(spec, connector=None, kv_transfer=transfer)
    with start_together({"identity-advice": spec}, work=work) as (engine,):
        for _ in range(2):
            ask(engine)
        text = engine.log_text()
    for setting in ("kv_load_failure_policy is", "prefix_cache_retention_interval is", "set --block-size 640"):
        assert text.count(setting) == 1, setting
