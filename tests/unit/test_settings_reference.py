"""docs/settings.md: what the code says, all of it, and nothing else."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from connector.settings import ConnectorSettings
from kvstore.settings import Settings
from tests.architecture.sources import ROOT


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("settings_reference", ROOT / "tools" / "settings_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(reference: ModuleType) -> None:
    """Whoever changes a setting makes the page anew."""
    hint = "run: python tools/settings_reference.py --write"
    assert reference.PAGE.read_text() == reference.page(), hint


def test_every_setting_is_described_once(reference: ModuleType) -> None:
    """In the order of the code, with words of its own, a default that can be read, and when to change it."""
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", reference.page(), re.MULTILINE)
    assert [row[0] for row in rows] == [*Settings.model_fields, *ConnectorSettings.__dataclass_fields__]
    for name, takes, default, told, when in rows:
        assert takes and default and len(told) > 20, name
        assert told[0].isupper() or told[0] in "`", name
        assert re.match(r"(Change|Raise|Lower|Set) .*\b(when|with)\b.*\.$", when), name
        assert not re.search(r"object at|Location\(|Address\(", default), name
