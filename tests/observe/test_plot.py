"""The text plot: rows, scale, gaps."""

from __future__ import annotations

from tandem.observe import text_plot


def columns(plot: str, height: int) -> list[str]:
    """Each column of the plot area from the bottom up, blanks included."""
    rows = [line.split("│", 1)[1] for line in plot.splitlines()[:height]]
    width = max(len(row) for row in rows)
    return ["".join(row.ljust(width)[i] for row in reversed(rows)) for i in range(width)]


def test_ramp_fills_one_more_row_a_column() -> None:
    # 32 eighths, the lowest value taking one: 1, 1 + 31/3, 1 + 62/3, 32.
    plot = text_plot([0.0, 1.0, 2.0, 3.0], width=4, height=4)
    assert [column.rstrip() for column in columns(plot, 4)] == ["▁", "█▃", "██▆", "████"]


def test_extremes_label_the_axis() -> None:
    lines = text_plot([0.25, 1.5], height=3).splitlines()
    assert lines[0].startswith(" 1.5 │")
    assert lines[2].startswith("0.25 │")
    assert lines[3].strip().startswith("└──")


def test_more_values_than_columns_are_averaged() -> None:
    assert text_plot([0, 2, 4, 6], width=2, height=2) == text_plot(
        [1, 5], width=2, height=2
    ).replace("1 step", "3 step")


def test_missing_values_leave_a_gap() -> None:
    assert [c.strip() for c in columns(text_plot([1.0, None, float("nan"), 1.0], height=2), 2)] == [
        "█",
        "",
        "",
        "█",
    ]


def test_nothing_to_draw_is_said() -> None:
    assert text_plot([]) == "(no values yet)"
    assert text_plot([None, float("nan")]) == "(no values yet)"
