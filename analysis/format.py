"""Numbers as text for readers: three significant digits and a unit; never NaN, None or a negative zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

NOT_REACHED = "not reached"
NOTHING = "–"
MINUS = "−"
FACTOR = 10_000  # larger factors are shown as "10,000 or more"
SPACE = "\u00a0"  # keeps a number and its unit on one line
POINTS = f"{SPACE}points"  # percentage points


def significant(value: float, digits: int = 3) -> str:
    """`value` rounded to `digits` significant digits, without an exponent and with commas between thousands."""
    if not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    places = digits - 1 - math.floor(math.log10(abs(rounded)))  # again, as 9.996 has become 10.0
    text = f"{abs(rounded):,.{max(places, 0)}f}"
    return (MINUS if rounded < 0 else "") + text


def seconds(value: float | None) -> str:
    """A duration with its unit, from µs to s."""
    if value is None:
        return NOT_REACHED
    size = abs(value)
    factor, unit = (1.0, "s") if size >= 1 else (1e3, "ms") if size >= 1e-3 or size == 0 else (1e6, "µs")
    return f"{significant(value * factor)}{SPACE}{unit}"


def number(value: float | None, unit: str = "") -> str:
    """A number and its unit; a dash if it is unknown. Whole numbers are not rounded."""
    if value is None:
        return NOTHING
    whole = float(value).is_integer() and abs(value) < 1e15
    text = f"{abs(int(value)):,}" if whole else significant(abs(value))
    return (MINUS if value < 0 else "") + text + (f"{SPACE}{unit}" if unit else "")


def count(num: float, noun: str) -> str:
    """A count with its noun, in the plural unless it is 1: "1 request", "1,234 requests"."""
    return f"{number(num)} {noun if num == 1 else f'{noun}s'}"


def left(num: int, noun: str) -> str:
    """What a text leaves to tables: "1 more load is in the tables", "2 more loads are in the tables"."""
    return f"{count(num, f'more {noun}')} {'is' if num == 1 else 'are'} in the tables"


def mean_count(value: float | None) -> str:
    """A mean of counts. Below 1 it has at most two decimals, since a thousandth of a request means nothing."""
    if value is None or abs(value) >= 1:
        return number(value)
    return f"{abs(value):.2f}".rstrip("0").rstrip(".")


def share(value: float | None) -> str:
    """A share (1 is all) in percent. "100 %" means all: a smaller share that rounds to it is shown as "> 99.9 %"."""
    if value is None:
        return NOTHING
    text = significant(100.0 * value)
    return f"{f'>{SPACE}99.9' if text == '100' and value < 1.0 - 1e-9 else text}{SPACE}%"


def percent(ratio: float) -> str:
    """An error or a spread (1 is 100 %) in percent, with two digits."""
    return f"{significant(100 * ratio, 2)} %"


def points(difference: float) -> str:
    """A difference of two shares, in percentage points, always with a sign unless it is 0. What remains of a
    difference of equal means in floating point is 0."""
    value = round(100.0 * difference, 9)
    return f"{'+' if value > 0 else ''}{significant(value, 3 if abs(value) >= 10 else 2)}{POINTS}"


def change(percent: float) -> str:
    """A relative change in percent, always with a sign unless it rounds to 0. From ten times as much (or a tenth) on it
    is a factor, of at most FACTOR: an interval from two replicates may reach millions."""
    if not math.isfinite(percent):
        return NOTHING
    if _is_factor(percent):
        return _factor(percent)
    digits = 1 if abs(percent) < 9.95 else 0
    rounded = round(percent, digits)
    if rounded == 0:
        return f"0{SPACE}%"
    text = f"{abs(rounded):.{digits}f}"
    return f"{'+' if rounded > 0 else MINUS}{text}{SPACE}%"


def changes(percents: Sequence[float]) -> list[str]:
    """Changes that are read together (an estimate and its interval): all are factors if one of them is. An end near 0
    of a change that is not has its first digit, as it shows on which side of 0 the interval lies."""
    if any(map(_is_factor, percents)):
        return [_factor(percent) if math.isfinite(percent) else NOTHING for percent in percents]
    if not percents or round(percents[0], 1) == 0:
        return [change(percent) for percent in percents]
    return [_small(percent) if 0.0005 <= abs(percent) < 0.05 else change(percent) for percent in percents]


def _small(percent: float) -> str:
    return f"{'+' if percent > 0 else ''}{significant(percent, 1)}{SPACE}%"


def _is_factor(percent: float) -> bool:
    return percent >= 900 or -100 < percent < -90


def _factor(percent: float) -> str:
    times = max(0.0, 1 + percent / 100)
    size, sign = (times, "×") if times >= 1 else (1 / times if times else math.inf, "÷")
    if size >= FACTOR:
        return f"{sign}{significant(FACTOR, 2)} or more"
    return f"{sign}{significant(size, 2 if size >= 1.1 else 3)}"


def plain(value: Any) -> str:
    """A configuration value as text: on and off for booleans, "default" for null, `component`'s text for components."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list) and value and all(isinstance(one, Mapping) and component(one) for one in value):
        return " + ".join(component(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def component(settings: Mapping[str, Any], *, is_exact: bool = False) -> str:
    """A component with its arguments: "AtMost(n=16)", "window(start_s=0, stop_s=60)"; "" if no key names one. is_exact:
    "mine.AtMost(n=16)", and arguments with all their digits."""
    said = next((settings[key] for key in ("_target_", "name") if settings.get(key)), None)
    if said is None:
        return ""
    write = str if is_exact else plain
    arguments = [f"{key}={write(value)}" for key, value in settings.items() if key not in ("_target_", "name")]
    name = str(said) if is_exact else str(said).rsplit(".", 1)[-1]
    return name + (f"({', '.join(arguments)})" if arguments else "")


def names(words: Sequence[str], most: int | None = None) -> str:
    """Names as a `listing`; one that has a comma of its own is in quotes."""
    return listing([f"“{word}”" if ", " in word else word for word in words], most)


def listing(words: list[str], most: int | None = None) -> str:
    """Words as a list, "a, b and c"; if there are more than `most`, only the first ones: "a, b and 3 more"."""
    if most is not None and len(words) > most:
        words = [*words[:most], f"{len(words) - most} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
