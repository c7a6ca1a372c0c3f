"""The settings of SGLang that our namespaces hold are settings of the published package, if it is at hand."""

from __future__ import annotations

import ast

import pytest

from connector.sglang import engine
from tests.connector.support.hicache import find_sglang

PACKAGE = find_sglang()


@pytest.mark.skipif(PACKAGE is None, reason="no sglang here: run tools/other_packages.py sglang")
def test_every_setting_is_one_of_sglang() -> None:
    """A name that SGLang does not have would tell no two engines apart."""
    assert PACKAGE is not None
    order = ast.parse((PACKAGE / "srt/arg_groups/field_order.py").read_text())
    known = {node.value for node in ast.walk(order) if isinstance(node, ast.Constant)}
    named = {*vars(engine)["_SETTINGS"], *vars(engine)["_OTHER_FILES"]}
    assert len(named) > 40 and not named - known
