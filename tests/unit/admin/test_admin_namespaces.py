"""Namespaces as people know them: by model and types, side by side, and gone once they are empty."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvstore.cli.main import main
from kvstore.model.namespace import NamespaceDescription, describe_layout
from kvstore.testing.prompts import ATTENTION, Prompt
from tests.unit.admin.service_harness import ServiceHarness, open_service

LAYOUT = describe_layout(ATTENTION)
LLAMA = {"architecture": "LlamaForCausalLM", "compute_dtype": "bfloat16", "cache_dtype": "auto", "layout": LAYOUT}
FP8 = {**LLAMA, "cache_dtype": "fp8_e4m3"}


async def saved(made: ServiceHarness, fields: dict[str, object]) -> Prompt:
    prompt = Prompt(ATTENTION, "a", 64 * 2)
    object.__setattr__(prompt, "description", NamespaceDescription.from_fields(fields))
    return await made.save(prompt)


async def test_every_list_names_the_model_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ls`, `top`, `show` and the routes have model and types; two of one model are told apart by what differs, and
    `show --compare` has the fields that differ with both values, and no others; what is emptied is listed no more."""
    async with open_service(tmp_path, with_tokens=False) as made, made.client() as admin:
        monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", made.url.removeprefix("http://"))
        one, other = await saved(made, LLAMA), await saved(made, FP8)

        async def run(*arguments: str) -> str:
            capsys.readouterr()
            assert await asyncio.to_thread(main, arguments) == 0
            return capsys.readouterr().out

        for verb in (["ls"], ["top", "--once"]):
            out = await run(*verb)
            assert "LlamaForCausalLM bfloat16" in out and "LlamaForCausalLM bfloat16, cache fp8_e4m3" in out
        assert "LlamaForCausalLM bfloat16" in await run("show", one.namespace.hex())
        compared = await run("show", one.namespace.hex(), "--compare", other.namespace.hex()[:10])
        assert "cache_dtype" in compared and "auto" in compared and "fp8_e4m3" in compared
        assert "compute_dtype" not in compared and "1 fields differ" not in compared and "1 field differs" in compared
        asked = json.loads(await run("show", one.namespace.hex(), "--compare", other.namespace.hex(), "--json"))
        assert asked["differences"] == {"cache_dtype": ["auto", "fp8_e4m3"]}
        await run("rm", one.namespace.hex(), "--yes")
        listed = (await admin.get("/v1/namespaces")).json()["namespaces"]
        assert [(row["name"], row["namespace"]) for row in listed] == [
            ("LlamaForCausalLM bfloat16, cache fp8_e4m3", other.namespace.hex())
        ]
        assert one.namespace.hex() not in await run("ls")
