"""`open_store`: what the settings name is opened, wired and closed again."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from kvstore.compose import open_store
from kvstore.compose.store import store_limits
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.settings import load_settings
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.store_node import save_all
from kvstore.testing.waiting import soon


async def test_an_embedded_store_survives_its_process(tmp_path: Path) -> None:
    """Memory and a directory, closed and opened again: what was saved is staged from the directory."""
    settings = load_settings({"memory_bytes": "16MiB", "disk_bytes": "64MiB", "cold": f"file://{tmp_path}/records"})
    prompt = Prompt(ATTENTION, "a", 250)
    async with open_store(settings) as store:
        await save_all(store, prompt)
    with pytest.raises(Closed):
        await store.status(deadline=soon())
    async with open_store(settings) as store:
        await store.open_namespace(prompt.description, deadline=soon())
        staged = await store.stage(prompt.query(), deadline=soon())
        assert staged.resume_tokens == 240
        assert staged.sources == {"filesystem": 8}


async def test_the_directory_is_given_back(tmp_path: Path) -> None:
    """A second store on the directory is refused while the first is open, and works after it, also after an error."""
    settings = load_settings({"memory_bytes": "16MiB", "disk_bytes": "64MiB", "cold": f"file://{tmp_path}/records"})
    with pytest.raises(RuntimeError, match="of the caller"):
        async with open_store(settings):
            with pytest.raises(Unavailable):
                async with open_store(settings):
                    pass
            raise RuntimeError("of the caller")
    async with open_store(settings) as store:
        assert "filesystem" in (await store.status(deadline=soon()))["tiers"]


async def test_an_unreachable_tier_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """No Redis answers: one warning with the next step and without the password, and the store works without it."""
    port = free_ports(1)[0]
    settings = load_settings(
        {"memory_bytes": "16MiB", "cold": "memory:", "hot": f"redis://:hunter2@127.0.0.1:{port}", "drain_timeout_s": 0}
    )
    prompt = Prompt(ATTENTION, "a", 128)
    async with open_store(settings) as store:
        assert f"redis://127.0.0.1:{port}/0 is running" in caplog.text
        assert "hunter2" not in caplog.text
        await save_all(store, prompt)
        assert (await store.stage(prompt.query(), deadline=soon())).resume_tokens == 128


@pytest.mark.parametrize(
    ("setting", "module", "extra"),
    [
        ({"hot": "redis://127.0.0.1:1"}, "kvstore.tiers.redis", "redis"),
        ({"cold": "s3://bucket"}, "kvstore.tiers.s3", "s3"),
    ],
)
async def test_a_missing_extra_is_told_with_its_name(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, object], module: str, extra: str
) -> None:
    """The packages of a tier are not installed: the message is the command that installs them."""
    monkeypatch.setitem(sys.modules, module, None)  # an import of it fails as if it were not there
    settings = load_settings({"memory_bytes": "16MiB", "cold": "memory:"} | setting)
    with pytest.raises(InvalidRequest, match=rf"pip install 'kvstore-vllm\[{extra}\]'"):
        async with open_store(settings):
            pass


async def test_a_certificate_that_is_not_there_is_refused() -> None:
    """A file of the url that cannot be read is an error of the settings: it names the file."""
    settings = {"memory_bytes": "16MiB", "cold": "memory:", "hot": "rediss://h?ca_file=/no/such.pem"}
    with pytest.raises(InvalidRequest, match=r"check that it exists.*/no/such\.pem"):
        async with open_store(load_settings(settings)):
            pass


def test_limits_follow_the_settings() -> None:
    """Units are converted, and stages may pin three quarters of memory."""
    limits = store_limits(load_settings({"memory_bytes": 1000, "stall_timeout_ms": 250, "lease_s": 3}))
    assert (limits.stage_bytes, limits.stall_timeout_s, limits.lease_s) == (750, 0.25, 3.0)


@pytest.mark.parametrize("bound", [{"cold_bytes": "1GiB"}, {"cold_unused_s": 60}])
async def test_a_bound_without_a_catalog_is_refused(bound: dict[str, object]) -> None:
    """Without a directory or a Redis nobody keeps the books of the cold tier: the message says what would."""
    settings = load_settings({"memory_bytes": "16MiB", "cold": "memory:"} | bound)
    with pytest.raises(InvalidRequest, match="need a directory as cold, or a Redis as hot"):
        async with open_store(settings):
            pass


async def test_a_directory_store_needs_no_client() -> None:
    """Memory, a directory and its catalog, as the embedded store has them: no Redis, no S3 client and no torch."""
    code = (
        "import asyncio, sys, tempfile\n"
        "from kvstore.compose import open_store\n"
        "from kvstore.settings import load_settings\n"
        "async def run(folder):\n"
        "    settings = load_settings({'memory_bytes': '16MiB', 'disk_bytes': '16MiB', 'cold': 'file://' + folder})\n"
        "    async with open_store(settings):\n"
        "        pass\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    asyncio.run(run(folder))\n"
        "print([name for name in ('redis', 'botocore', 'aiobotocore', 'torch') if name in sys.modules])\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.decode().splitlines()[-1] == "[]"


async def test_guarantees_that_leave_no_room_are_refused(tmp_path: Path) -> None:
    """More than three quarters of the bound is guaranteed: others could not be held at all."""
    cold = {"cold": f"file://{tmp_path}/records", "disk_bytes": "1GiB", "quotas": "a=500MiB,b=300MiB"}
    with pytest.raises(InvalidRequest, match="quotas guarantee more than three quarters"):
        async with open_store(load_settings({"memory_bytes": "16MiB"} | cold)):
            pass
