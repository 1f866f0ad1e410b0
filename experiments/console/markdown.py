"""Tables as aligned text, which is Markdown too."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """A Markdown table whose columns are aligned. numbers: as all but the first are, at the right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    is_right = [numbers and index > 0 for index in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        columns = zip(cells, widths, is_right, strict=True)
        return f"| {' | '.join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns)} |"

    rule = "|".join("-" * (width + 1) + (":" if right else "-") for width, right in zip(widths, is_right, strict=True))
    return "\n".join([line(headers), f"|{rule}|", *map(line, rows)])


def percent(share: float | None, *, signed: bool = True) -> str:
    """A share of 1 in percent: with one decimal below 100, without from there on; a dash where it is not known."""
    if share is None or share != share:
        return "–"
    value = 100.0 * share
    digits = 0 if abs(value) >= 99.95 else 1
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    return "0.0" if float(text) == 0 else text


def milliseconds(seconds: float | None) -> str:
    """Seconds in ms, four significant digits."""
    if seconds is None or seconds != seconds:
        return "–"
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
