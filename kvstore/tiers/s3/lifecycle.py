"""Rules by which S3 removes or moves objects by itself, read from what it answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LifecycleRule", "parse_rules"]


@dataclass(frozen=True, slots=True)
class LifecycleRule:
    """What one enabled rule does to current objects without tags, as ours are.

    Attributes:
        name: Its id; S3 assigns one if its author did not.
        prefix: Prefix of the names that it applies to.
        expires: When it removes them, in words like `after 30 days`; `None`: never.
        moves_to: By storage class: when it moves them there, in the same words.
    """

    name: str
    prefix: str
    expires: str | None
    moves_to: Mapping[str, str]

    def touches(self, root: str) -> bool:
        """Whether it removes or moves an object whose name starts with `root`."""
        overlaps = root.startswith(self.prefix) or self.prefix.startswith(root)
        return overlaps and (self.expires is not None or bool(self.moves_to))


def parse_rules(rules: Iterable[Mapping[str, Any]]) -> list[LifecycleRule]:
    """The enabled rules that apply to objects without tags.

    What a rule does to old versions and unfinished uploads does not affect records, which are written once.
    """
    return [_parse(rule) for rule in rules if rule.get("Status") == "Enabled" and not _asks_for_tags(rule)]


def _parse(rule: Mapping[str, Any]) -> LifecycleRule:
    conditions = _conditions(rule)
    return LifecycleRule(
        name=str(rule.get("ID", "")),
        prefix=str(conditions.get("Prefix", rule.get("Prefix", "")) or ""),
        expires=_when(rule.get("Expiration", {})),
        moves_to={str(move.get("StorageClass")): _when(move) or "at once" for move in rule.get("Transitions", ())},
    )


def _asks_for_tags(rule: Mapping[str, Any]) -> bool:
    conditions = _conditions(rule)
    return bool(conditions.get("Tag") or conditions.get("Tags"))


def _conditions(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    filter_ = rule.get("Filter") or {}
    conditions: Mapping[str, Any] = {**filter_, **filter_.get("And", {})}
    return conditions


def _when(action: Mapping[str, Any]) -> str | None:
    if action.get("Days") is not None:
        return f"after {action['Days']} days"
    return f"on {action['Date']}" if action.get("Date") is not None else None
