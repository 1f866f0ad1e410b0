"""Texts from outside (JSON, YAML): one way to parse them, to check a number in them, and to show a wrong value."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Collection
from typing import Any, TypeAlias, TypeVar
from unicodedata import category

from testbed.errors import TestbedError

T = TypeVar("T")
Unchecked: TypeAlias = Any  # a configured value that is not checked yet: compiled code must accept any type
NEAR = 0.62  # similarity (difflib) from which a known name is suggested: `queue_order` for queue, not `oracle` for lora
_MAX_DIGITS = 4000  # Python refuses to write much longer whole numbers as text


def parsed(parse: Callable[[str], T], text: str | bytes) -> T:
    """Returns parse(text). Raises ValueError, with the reason, also if the text is nested too deeply or is not UTF-8.

    Other errors of `parse` are passed on.
    """
    try:
        return parse(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None


def json_object(text: str | bytes, place: str, error: type[TestbedError], cure: str = "") -> dict[str, Any]:
    """Returns the object of a JSON text. Raises `error` for any other text. place, cure: begin and end of it."""
    try:
        found = parsed(json.loads, text)
    except ValueError as reason:
        raise error(f"{place} is not JSON: {reason}{cure}") from None
    if not isinstance(found, dict):
        raise error(f"{place} is not a JSON object, but {shown(found)}{cure}")
    return found


def not_yaml(error: BaseException) -> str:
    """Returns the text after a file's name for an error of PyYAML or of `parsed`: ", line 3: not YAML: …"."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    line = "" if mark is None else f", line {mark.line + 1}"
    return f"{line}: not YAML: {problem or ' '.join(str(error).split())}"


def number(low: float, high: float) -> Callable[[Any], bool]:
    """Returns a check whether a value is a number from low to high. NaN and booleans are not."""
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def whole(low: int, high: int) -> Callable[[Any], bool]:
    """Returns a check whether a value is a whole number from low to high."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def some(names: list[str]) -> str:
    """Returns the first few names, as text."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def shortened(value: object) -> str:
    """Returns str(value); for a number of many digits their count, for another long text its beginning."""
    if isinstance(value, int) and abs(value) >= 10**40:
        digits = int(value.bit_length() * math.log10(2)) + 1
        return f"a whole number of about {digits:,} digits"
    text = str(value)
    return text if len(text) <= 200 else text[:197] + "..."


class _Short(reprlib.Repr):
    """A repr with at most about 60 characters of each part, a few parts, and two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 2, 60, 40, 60

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 3 * _MAX_DIGITS:
            return shortened(x)
        return super().repr_int(x, level)


shown = _Short().repr


def visible(text: str) -> str:
    """The text with escapes for the characters that would steer a terminal instead of being seen on it."""
    return "".join(
        ascii(one)[1:-1] if category(one)[0] == "C" or category(one) in ("Zl", "Zp") else one for one in text
    )


def is_device(name: str, description: str) -> bool:
    """Whether a driver's description has the words of a device's name: `h100` is `NVIDIA H100 80GB HBM3`, `h200` is not
    `NVIDIA GH200 480GB`."""
    said = re.sub(r"(?i)\bblackwell ", "", description.replace("_", " "))
    words = " ?".join(re.findall(r"[a-z]+|\d+[a-z]*", name.lower()))
    return re.search(rf"\b{words}\b", said, re.IGNORECASE) is not None


def nearest(name: str, choices: Collection[str], cutoff: float = NEAR) -> str:
    """Returns 'did you mean …? ', or an empty text if no choice is as similar, in any letter case, as `cutoff`."""
    from difflib import get_close_matches  # seldom needed

    in_lower_case = {choice.lower(): choice for choice in choices}
    near = get_close_matches(name.lower(), in_lower_case, n=1, cutoff=cutoff)
    return f"did you mean {in_lower_case[near[0]]!r}? " if near else ""


def unknown(what: str, name: str, choices: Collection[str]) -> str:
    """Returns a one-line message with `what`, the nearest valid choice, and all choices."""
    return f"{what}; {nearest(name, choices)}valid: {', '.join(choices)}"
