"""Hydra's grammar of overrides (`key=value`): reads them, and writes values in it."""

from __future__ import annotations

import re
from functools import cache
from numbers import Number
from os import PathLike
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException

from testbed.errors import ConfigError
from testbed.foreign_text import shown

_SENTENCE = "report.question"  # its commas and brackets are punctuation


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


@cache
def parsed(override: str) -> Override:
    """Parses an override. Raises ConfigError if it is not one."""
    item = _read(readable(override))
    if item is not None and item.key_or_group:
        return item
    raise ConfigError(
        f"cannot read the override {override!r}: expected key=value; a string with a comma, a bracket or a quote "
        "has quotes of its own, as 'trace.path=\"a,b.jsonl\"'"
    )


def _read(override: str) -> Override | None:
    """Parses an override; None if Hydra's grammar cannot read it."""
    try:
        return _parser().parse_override(override)
    except HydraException:
        return None


def readable(override: str) -> str:
    """Returns the override, with quotes around a plain value that Hydra's grammar cannot read (such as é, =, (1)), and
    around a sentence."""
    key, _, value = override.partition("=")
    if key.lstrip("+") == _SENTENCE and not _is_one_text(override):
        return f"{key}={quoted(value)}"
    if not value or value[0] in "[{'\"" or "," in value:
        return override
    return f"{key}={literal(value)}" if _read(override) is None else override


def _is_one_text(override: str) -> bool:
    item = _read(override)
    return item is not None and not item.is_sweep_override() and (item.value() is None or isinstance(item.value(), str))


def is_text(override: str, text: str) -> bool:
    """Whether Hydra's grammar reads the override's value as exactly this text."""
    item = _read(override)
    return item is not None and not item.is_sweep_override() and item.value() == text


def keys_in(override: str) -> set[str]:
    """Returns the override's key and the dotted keys of a mapping that it gives, or of those that it sweeps. A class is
    one value, whose parameters may be changed beside it. Raises ConfigError for a mapping that cannot be read."""
    key = override.partition("=")[0].lstrip("+")
    if "{" not in override:
        return {key}
    value = parsed(override).value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    return {key}.union(*(_dotted(one, key) for one in values))


def _dotted(value: Any, key: str) -> set[str]:
    if not isinstance(value, dict) or "_target_" in value:
        return {key}
    return set[str]().union(*(_dotted(one, f"{key}.{name}") for name, one in value.items()))


def literal(value: Any, key: str = "a value") -> str:
    """Writes a Python value in Hydra's override grammar. Raises ConfigError for a type that the grammar lacks."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        items = (
            (re.sub(r"([\\()\[\]{}:=,])", r"\\\1", str(name)), literal(item, f"{key}.{name}"))
            for name, item in value.items()
        )
        return "{" + ",".join(f"{name}:{text}" for name, text in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(literal(item, key) for item in value) + "]"
    if not isinstance(value, str | PathLike | Number):
        name = f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else "mine.Order"
        raise ConfigError(
            f"{key} is {shown(value)}; give a number, a string, a list or a dict. A class of your own goes by its "
            f"name, as {{'_target_': '{name}'}} (docs/extending.md)"
        )
    text = str(value)
    is_plain = re.fullmatch(r"(?!(null|true|false|nan|inf)$)[a-z][\w.]*", text, re.ASCII | re.IGNORECASE)
    return text if is_plain or isinstance(value, Number) else quoted(text)


def quoted(text: str) -> str:
    """Quotes a text for Hydra's grammar. Backslashes are doubled only before a quote and at the end."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text) + "'"
