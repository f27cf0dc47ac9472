"""A curve drawn with text, for terminals and logs. Nothing here reads a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def text_plot(
    values: Sequence[float | None], *, width: int = 60, height: int = 8, label: str = "step"
) -> str:
    """Draw ``values`` over their index as columns of blocks, ``height`` rows high.

    More values than ``width`` are averaged into columns; None and NaN leave a gap. The vertical
    axis spans minimum to maximum and is labelled with both.
    """
    columns = _columns(values, width)
    present = [value for value in columns if value is not None]
    if not present:
        return "(no values yet)"
    low, high = min(present), max(present)
    levels = [_level(value, low, high, height) for value in columns]
    top, bottom = f"{high:.3g}", f"{low:.3g}"
    margin = max(len(top), len(bottom))
    lines = []
    for row in range(height - 1, -1, -1):
        mark = top if row == height - 1 else bottom if row == 0 else ""
        cells = (_BLOCKS[max(0, min(8, level - 8 * row))] for level in levels)
        lines.append(f"{mark:>{margin}} │{''.join(cells)}".rstrip())
    lines.append(f"{'':>{margin}} └{'─' * len(columns)}")
    last = str(len(values) - 1)
    gap = max(1, len(columns) - len(last) - 1)
    lines.append(f"{'':>{margin}}  0{'':>{gap}}{last} {label}")
    return "\n".join(lines)


def _columns(values: Sequence[float | None], width: int) -> list[float | None]:
    count = min(width, len(values))
    columns: list[float | None] = []
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        known = [value for value in part if value is not None and math.isfinite(value)]
        columns.append(math.fsum(known) / len(known) if known else None)
    return columns


def _level(value: float | None, low: float, high: float, height: int) -> int:
    """Filled eighths of a column: 0 for a gap, at least 1 for a value."""
    if value is None:
        return 0
    if high == low:
        return 8 * height // 2
    return 1 + round((value - low) / (high - low) * (8 * height - 1))
