"""Files that are read again when they change: when a change counts, and what an invalid file does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.runtime.watched_file import Watched, read_guarded, state_of


def watch(path: Path) -> Watched[int]:
    def load() -> int:
        try:
            return int(path.read_text())
        except (OSError, ValueError) as error:
            raise InvalidRequest("expected a number", error=error) from error

    return Watched("number", partial(state_of, path), load)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "number"
    path.write_text("1")
    return path


def test_a_change_counts_when_two_polls_have_seen_it(path: Path) -> None:
    """Not at the first poll that finds it, and once."""
    watched = watch(path)
    assert [watched.poll() for _ in range(3)] == [False] * 3
    path.write_text("22")
    assert [watched.poll() for _ in range(4)] == [False, True, False, False]
    assert (watched.value, watched.num_loaded, watched.num_refused) == (22, 2, 0)


def test_a_file_that_is_never_at_rest_changes_nothing(path: Path) -> None:
    """Each poll finds it empty or half written."""
    watched = watch(path)
    for number in range(200):
        path.write_text("" if number % 2 else "3" * (number + 1))
        assert not watched.poll()
    assert (watched.value, watched.num_refused) == (1, 0)


def test_an_invalid_file_keeps_the_previous_value(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once for each change, and the next valid content counts."""
    watched = watch(path)
    for harm in (lambda: path.write_text("not a number"), path.unlink):
        caplog.clear()
        harm()
        assert [watched.poll() for _ in range(4)] == [False] * 4
        assert watched.value == 1 and watched.problem.startswith("expected a number")
        assert caplog.text.count("keeping the previous number until this is corrected: expected a number") == 1
    path.write_text("4")
    assert [watched.poll() for _ in range(2)] == [False, True]
    assert (watched.value, watched.num_loaded, watched.num_refused, watched.problem) == (4, 2, 2, "")


def test_a_file_that_changes_while_it_is_read_does_not_count(path: Path) -> None:
    """What was read may be half of it."""
    contents = iter(["2", "3", "3"])

    def load() -> str:
        text = path.read_text()
        path.write_text(next(contents) + "x" * len(text))
        return text

    watched = Watched("text", partial(state_of, path), load)
    assert [watched.poll() for _ in range(3)] == [False] * 3
    assert watched.value == "1"


def test_a_source_that_is_never_half_written(path: Path) -> None:
    """Its first change counts at once."""
    watched = Watched("text", path.read_text, path.read_text, settles=False)
    path.write_text("2")
    assert [watched.poll() for _ in range(2)] == [True, False]
    assert watched.value == "2"


def test_an_invalid_file_at_the_start(path: Path) -> None:
    """The caller gets the error."""
    path.write_text("none")
    with pytest.raises(InvalidRequest, match="expected a number"):
        watch(path)


@pytest.mark.parametrize(("bits", "mode", "remedy"), [(0o022, 0o620, "chmod go-w"), (0o077, 0o640, "chmod 600")])
def test_a_file_that_others_may_change_or_read(path: Path, bits: int, mode: int, remedy: str) -> None:
    """It is refused with what to do."""
    path.chmod(mode)
    with pytest.raises(InvalidRequest, match=f"{remedy}.*field=some_file path={path}"):
        read_guarded(path, what="file", field="some_file", mode_bits=bits, bytes_max=9)
    path.chmod(0o600)
    assert read_guarded(path, what="file", field="some_file", mode_bits=bits, bytes_max=9) == b"1"
    with pytest.raises(InvalidRequest, match="cannot read the file field=some_file"):
        read_guarded(path / "none", what="file", field="some_file", mode_bits=bits, bytes_max=9)
