"""What our namespaces hold of SGLang's settings, and how their changes are noticed."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from connector.sglang import engine
from connector.sglang.engine import WeightsWatch
from tests.connector.support.hicache import find_sglang, hicache

PACKAGE = find_sglang()


@pytest.mark.skipif(PACKAGE is None, reason="no sglang here: run tools/other_packages.py sglang")
def test_every_setting_is_one_of_sglang() -> None:
    """A name that SGLang does not have would tell no two engines apart."""
    assert PACKAGE is not None
    order = ast.parse((PACKAGE / "srt/arg_groups/field_order.py").read_text())
    known = {node.value for node in ast.walk(order) if isinstance(node, ast.Constant)}
    named = {*vars(engine)["_SETTINGS"], *vars(engine)["_OTHER_FILES"]}
    assert len(named) > 40 and not named - known


@pytest.mark.skipif(PACKAGE is None, reason="no sglang here: run tools/other_packages.py sglang")
def test_the_log_of_changes_is_read_where_sglang_has_it() -> None:
    """Under another name it would be copied with each call."""
    assert PACKAGE is not None
    assert "self._overrides_log.append((source, dict(fields)))" in (PACKAGE / "srt/runtime_context.py").read_text()


class Log(list[Any]):
    """Counts the entries that were read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found)
        return found

    def __iter__(self) -> Any:
        self.num_read += len(self)
        return super().__iter__()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_long_log_of_changes_is_read_once(is_known: bool) -> None:
    """Adaptive speculation changes SGLang's settings as long as the engine runs. A call of ours reads what is new, and
    notices weights in it, also in a log that SGLang began anew; of another release it reads all.
    """
    with hicache(SimpleNamespace(model_path="a/model")) as sglang:
        context, watch = sglang.in_effect, WeightsWatch()
        log = Log([("adaptive_spec.restore", {"speculative_num_steps": 3})] * 10_000)
        context.overrides_log = lambda: [(source, dict(fields)) for source, fields in log]
        if is_known:
            vars(context)["_overrides_log"] = log
        else:
            del vars(context)["_overrides_log"]
        before = watch.now()
        assert [watch.now() for _ in range(100)] == [before] * 100
        assert (log.num_read == 10_000) is is_known
        log.append(("model_runner.update_model_fields", {"model_path": "a/model"}))
        after = watch.now()
        assert after != before and watch.now() == after
        if is_known:
            assert log.num_read == 10_001
            vars(context)["_overrides_log"] = Log(log)
            assert watch.now() == after
