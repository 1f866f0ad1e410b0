"""Hydra's grammar of overrides (`key=value`): reads them, and writes values in it."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache, reduce
from itertools import starmap
from numbers import Number
from operator import or_
from os import PathLike
from typing import Any

from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

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


def keys_in(override: str) -> Counter[str]:
    """Returns the override's key and the dotted keys in its mapping, with the number of times that one value of the
    override gives each. Raises ConfigError for a mapping that cannot be read."""
    own = Counter([override.partition("=")[0].lstrip("+")])
    if "{" not in override:
        return own
    parsed(override)  # raises
    parser: Any = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(readable(override)))))
    value = parser.override().value()
    return own if value is None else own | _counted(value, *own)


def _counted(node: Any, key: str) -> Counter[str]:
    """Counts the keys in a part of the grammar's tree: those of a mapping and of a list's items add up, and of the
    values of a sweep each is a run of its own. A class is one value, whose parameters may be changed or swept."""
    if isinstance(node, OverrideParser.DictContainerContext):
        pairs = [(pair.element(), f"{key}.{pair.dictKey().getText().strip()}") for pair in node.dictKeyValuePair()]
        counts = sum(starmap(_counted, pairs), Counter[str]())
        if f"{key}._target_" not in counts:
            return counts
        return Counter([key]) + Counter({name: num for name, num in counts.items() if num > 1})
    if isinstance(node, OverrideParser.ListContainerContext):
        items = [(item, f"{key}[{index}]") for index, item in enumerate(node.element())]
        return sum(starmap(_counted, items), Counter([key]))
    parts = node.getChildren() if node.getChildCount() else ()
    return reduce(or_, [_counted(part, key) for part in parts] or [Counter([key])])


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
