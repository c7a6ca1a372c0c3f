"""Fixtures of real servers, virtual time for tests that ask for it, and hypothesis settings: no time limit per example,
since the machines are shared."""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from kvstore.runtime.clock import SystemClock
from kvstore.testing.warm_services import warm_services
from tests.virtual_time import VirtualClock, VirtualLoop
from tests.workers import EnginesInTurn, comes_last

pytest_plugins = ["kvstore.testing.fixtures"]

# An engine's threads wait for each other by spinning. Beside another process, as another worker is, most of an engine's
# time is spent so: four prompts took 96 s beside one busy loop, and 30 s with threads that sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Each of over 150 engines would spend seconds on compiling one small function of vLLM's, which ranks log probabilities.
# With the stand-in for Triton torch can compile nothing.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Without it each of thousands of processes, and each worker, compiles all of our modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts background jobs with SIGINT ignored. Children inherit that: those that tests interrupt would not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("kvstore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("kvstore")

# What the engine's side needs and the store's does not. Where one is not installed, its tests are skipped.
_OF_ENGINES = ("msgspec", "torch", "transformers", "vllm")
_MISSING = [name for name in _OF_ENGINES if importlib.util.find_spec(name) is None]
_NO_MODULE = re.compile(rf"No module named '({'|'.join(_OF_ENGINES)})\b")


def _missing(error: str) -> str | None:
    """The module that an error says is missing, if it is one of those that may be."""
    no = _NO_MODULE.search(error)
    return no[1] if no is not None and no[1] in _MISSING else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that cannot be imported without them."""
    report = yield
    if report.failed and (name := _missing(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: no {name} here")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip a test that starts an engine, or imports one of them itself."""
    if "vllm" in _MISSING and item.get_closest_marker("engine") is not None:
        pytest.skip("no vllm here")
    try:
        yield
    except ModuleNotFoundError as error:
        if name := _missing(str(error)):
            pytest.skip(f"no {name} here")
        raise


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put last what is to be handed out last. Leave out what is marked `full`, and say so in the summary, unless
    `make test-full` asks for everything.
    """
    items.sort(key=lambda item: comes_last(item.nodeid))
    if os.environ.get("KVSTORE_TEST_FULL") == "1":
        return
    full = [item for item in items if item.get_closest_marker("full") is not None]
    if full:
        items[:] = [item for item in items if item not in full]
        config.hook.pytest_deselected(items=full)


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    """Hundreds of services start here; what they import is imported once."""
    with warm_services():
        yield


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say what was seen in the run's summary, whichever worker the test runs in."""
    return lambda text: request.node.user_properties.append(("told", text))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests told, whether they passed or not: a section for each function."""
    told: dict[str, list[str]] = {}
    for report in (one for kind in ("passed", "failed", "rerun") for one in terminalreporter.stats.get(kind, ())):
        if report.when == "call" and (texts := [text for name, text in report.user_properties if name == "told"]):
            told.setdefault(report.nodeid.partition("[")[0], []).extend(texts)
    for function, texts in told.items():
        terminalreporter.section(function, sep="-")
        terminalreporter.write("\n".join([*texts, ""]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """How `make test` shares the suite out."""
    return EnginesInTurn(config, log)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A loop whose clock jumps, for tests of deadlines and stalls that need neither sockets nor threads."""
    is_virtual = item.get_closest_marker("virtual_time") is not None
    return {"virtual" if is_virtual else "real": VirtualLoop if is_virtual else asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def virtual_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's clock is the loop's in tests that are marked `virtual_time`: what a slow machine does between two
    awaits takes no time, so that a deadline passes where the test means it to and nowhere else."""
    if request.node.get_closest_marker("virtual_time") is not None:

        def clock() -> VirtualClock:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            return VirtualClock(loop)

        monkeypatch.setattr(SystemClock, "monotonic_s", lambda self: clock().monotonic_s())
        monkeypatch.setattr(SystemClock, "wall_ms", lambda self: clock().wall_ms())


@pytest.fixture(autouse=True)
def no_dump_of_long_tests(request: pytest.FixtureRequest) -> None:
    """What is marked `full` may take an hour. A dump of running threads is for a test that hangs: it reads their
    frames without a lock, and a test that was well has died in the middle of one, five minutes in."""
    if request.node.get_closest_marker("full") is not None:
        faulthandler.cancel_dump_traceback_later()
