"""What docs/cli.md says of the verbs is what the command has, and shells can complete them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.architecture.sources import ROOT


def verbs() -> set[str]:
    """What the modules of the command line say they are, each in its first words."""
    heads = (path.read_text().partition(":")[0] for path in (ROOT / "kvstore/cli").glob("*.py"))
    return {verb for head in heads for verb in re.findall(r"`kvstore (\w+)`", head)}


def test_every_verb_is_in_the_reference() -> None:
    """The table lists each verb, and no other, and `kvstore --help` shows the same."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == verbs()
    shown = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert set(re.findall(r"^│ (\w+) ", shown, re.MULTILINE)) == listed


def test_shells_complete_verbs() -> None:
    """As a shell asks for it."""
    asked = {"_KVSTORE_COMPLETE": "complete_bash", "COMP_WORDS": "kvstore w", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['kvstore']; from kvstore.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **asked},
    )
    assert done.stdout.split() == ["weights"]
