"""A line chart as SVG text: hit rate over budget, one line per policy. Drawn without a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

__all__ = ["draw_curve"]

_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 210, 44, 52
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
_STRONG = "auto"
_BOUND = "clairvoyant"


def draw_curve(title: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """An SVG document.

    Args:
        title: Above the chart.
        lines: Per policy the points: budget (in blocks, above zero) and token hit rate, by ascending budget.
    """
    budgets = sorted({budget for points in lines.values() for budget, _ in points})
    top = max((rate for points in lines.values() for _, rate in points), default=0.0)
    step = next((step for step in (0.01, 0.02, 0.05, 0.1) if top <= step * 8), 0.2)
    high = max(step, math.ceil(top / step) * step)
    low_log, high_log = math.log(budgets[0]), math.log(budgets[-1])

    def x(budget: int) -> float:
        share = (math.log(budget) - low_log) / (high_log - low_log) if high_log > low_log else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / high * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="26" font-size="16">{escape(title)}</text>',
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">budget, blocks</text>',
    ]
    for number in range(round(high / step) + 1):
        rate = number * step
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(rate):.1f}" y2="{y(rate):.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.0%}</text>'
        )
    parts += [
        f'<text x="{x(budget):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{budget:,}</text>'
        for budget in budgets
    ]
    for index, (name, points) in enumerate(lines.items()):
        parts += _line(name, [(x(budget), y(rate)) for budget, rate in points], index)
    return "\n".join([*parts, "</svg>\n"])


def _line(name: str, points: Sequence[tuple[float, float]], index: int) -> list[str]:
    colour = "black" if name == _STRONG else "#888" if name == _BOUND else _COLOURS[index % len(_COLOURS)]
    style = f'stroke="{colour}" stroke-width="{3 if name == _STRONG else 1.6}"'
    if name == _BOUND:
        style += ' stroke-dasharray="6 4"'
    path = " ".join(f"{at:.1f},{up:.1f}" for at, up in points)
    label_x, label_y = _WIDTH - _RIGHT + 46, _TOP + 10 + 22 * index
    return [
        f'<polyline points="{path}" fill="none" {style}/>',
        *(f'<circle cx="{at:.1f}" cy="{up:.1f}" r="3" fill="{colour}"/>' for at, up in points),
        f'<line x1="{label_x - 30}" x2="{label_x - 6}" y1="{label_y - 4}" y2="{label_y - 4}" {style}/>',
        f'<text x="{label_x}" y="{label_y}">{escape(name)}</text>',
    ]
