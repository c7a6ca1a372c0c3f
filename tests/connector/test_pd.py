"""Disaggregated prefill through the store, as `make demo-pd` shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from demo.pd import LENGTHS

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 128


def test_a_decode_server_restores_what_a_prefill_server_computed(work: Path) -> None:
    """Two vLLM servers and the proxy: every prompt is computed by one and restored by the other, up to its last block.

    The generated tokens equal those of an engine without a connector.
    """
    command = [sys.executable, "-m", "demo.pd", "--work", str(work)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    word, _, text = done.stdout.strip().splitlines()[-1].partition(" ")
    assert word == "DEMO-PD"
    rows = json.loads(text)["rows"]
    assert [row["prompt_tokens"] for row in rows] == list(LENGTHS)
    assert [row["prefill_computed_tokens"] for row in rows] == list(LENGTHS)
    assert [row["external_tokens"] for row in rows] == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert all(row["outputs_equal"] for row in rows)
