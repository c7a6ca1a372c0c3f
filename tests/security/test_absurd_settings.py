"""Settings that no machine can have, and too low a limit of open files: one clear line, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.runtime.sizes import BYTES_MAX, parse_bytes
from kvstore.settings import Settings, load_settings
from kvstore.testing.attacked import AttackedService
from kvstore.testing.waiting import eventually
from tests.security.raw_peer import RawPeer, greeted

DIGITS = "9" * 400
ABSURD = (
    *(DIGITS, "-" + DIGITS, "9" * 5000, "1e400", "nan", "inf", f"1.{DIGITS}GiB", f"{DIGITS}GiB"),
    *(f"0.{DIGITS}", f"a={DIGITS}", f"a={DIGITS}:{DIGITS}"),
    *("x" * 10_000, "\x00", "", "é" * 300, f"unix:/{DIGITS}", f"tcp://h:{DIGITS}", f"127.0.0.1:{DIGITS}"),
    *("s3://" + "b" * 5000, f"redis://h:{DIGITS}", f"file:///{'a/' * 4000}", f"http://{'h' * 5000}", "\n\n\n"),
)


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_values_of_every_setting(name: str, tmp_path: Path) -> None:
    """From a flag and from a file, each is a setting, or is refused in a line that names it."""
    path = tmp_path / "settings.toml"
    numbers = [int(DIGITS), -int(DIGITS), float("inf"), 10**18 + 1]
    for value in (*ABSURD, *numbers):
        text = value if isinstance(value, str) else str(value)
        for given in ({"flags": {name: value}}, {"config": path}):
            quoted = f"{name} = '''{text}'''\n" if isinstance(value, str) else f"{name} = {text}\n"
            path.write_text(quoted.replace("\x00", ""))
            try:
                load_settings(**given)  # type: ignore[arg-type]
            except InvalidRequest as error:
                said = str(error)
                assert len(said) < 700 and "\n" not in said and name in said, said
    path.write_text(f"{name} = {'9' * 5000}\n")
    with pytest.raises(InvalidRequest, match="not TOML"):
        load_settings(config=path)


@pytest.mark.parametrize("text", [f"{BYTES_MAX + 1}", "2EiB", "1025PiB", f"{DIGITS}GiB", f"1.{DIGITS}KiB", "9" * 5000])
def test_sizes(text: str) -> None:
    """A size is at most 1 EiB and written in a few digits."""
    with pytest.raises(ValueError, match="expected"):
        parse_bytes(text)
    assert parse_bytes("1024PiB") == BYTES_MAX


def served(folder: Path, limit: int, **more: str) -> subprocess.CompletedProcess[str]:
    """`kvstore serve` under a limit of open files, until it ends."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    env |= {"KVSTORE_LISTEN": f"unix:{folder / 's'}", "KVSTORE_ADMIN_LISTEN": "off", "KVSTORE_MEMORY_BYTES": "16MiB"}
    env |= {"KVSTORE_COLD": f"file://{folder / 'records'}", **more}
    command = ["bash", "-c", f'ulimit -Sn {limit}; ulimit -Hn {limit}; exec "$@"', "bash"]
    command += [sys.executable, "-m", "kvstore.cli", "serve"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("limit", [64, 255])
def test_too_few_files(folder: Path, limit: int) -> None:
    """With 64 it does not begin to serve, and says in a line what to raise."""
    ended = served(folder, limit)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert "limit of open files" in line and "LimitNOFILE" in line and f"got {limit}" in line


def test_all_files_are_open(folder: Path) -> None:
    """More peers come than files can be opened: that is said once, who is connected is served, and so is who comes when
    others have left."""
    made = AttackedService(folder)
    limited = ["bash", "-c", 'ulimit -Sn 256; ulimit -Hn 256; exec "$@"', "bash"]
    made.process.command = [*limited, *made.process.command]
    with made, ExitStack() as stack:
        first = stack.enter_context(greeted(made))
        give_up_s = time.monotonic() + 60
        with ExitStack() as others:
            while "no more descriptors" not in made.log_tail():
                assert time.monotonic() < give_up_s
                peer = others.enter_context(RawPeer(made.url, greet=False))
                with suppress(OSError):
                    peer.sock.settimeout(0.2)
                    others.enter_context(RawPeer(made.url))
            time.sleep(1.0)
            assert made.log_tail().count("no more descriptors") == 1
            assert "Traceback" not in made.log_tail()
            assert not first.is_ended()
        eventually(lambda: RawPeer(made.url), despite=(OSError, AssertionError)).die()
