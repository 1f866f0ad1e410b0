"""Tables as aligned text, which is Markdown too."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned; the first column is text, the others are numbers."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(headers), rule, *(line(row) for row in rows)])


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
