"""Whether a user's class reads how long an output will be, as no scheduler knows: only oracles are told."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from textwrap import dedent
from types import ModuleType
from typing import Any

_TELLING = re.compile(r"\.(forced_output|token_limit|foreseen_end|first_tokens|next_tokens|_content)\b")
_OURS = ("testbed", "sim", "real", "experiments", "analysis", "builtins")
_LIBRARY = sysconfig.get_path("stdlib")


def foresight_of(*made: Any) -> str:
    """The attribute that says it and that these functions and classes read, or what else of the user's they name, which
    lies in the same module or one that it imports; empty: none does."""
    todo, seen = list(made), set()
    packages = {_package(part) for one in made for part in (one, *_bases(one))}
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        source = _own_source(one, packages)
        if (read := _TELLING.search(source)) is not None:
            return read[1]
        todo += [*_bases(one), *(_named(source, vars(sys.modules.get(one.__module__, sys))) if source else ())]
    return ""


def _bases(one: Any) -> tuple[Any, ...]:
    return one.__mro__ if isinstance(one, type) else ()


def _package(one: Any) -> str:
    return str(getattr(one, "__module__", None) or "builtins").partition(".")[0]


def _own_source(one: Any, packages: set[str]) -> str:
    """Of a function or class of the user's; empty: it is none, or without source. packages: the user's, also where they
    are installed."""
    if _package(one) in _OURS:
        return ""
    try:
        file = inspect.getsourcefile(one) or ""
        is_installed = "site-packages" in file
        is_foreign = _package(one) not in packages if is_installed else file.startswith(_LIBRARY)
        return "" if is_foreign else dedent(inspect.getsource(one))
    except (OSError, TypeError):
        return ""


def _named(source: str, there: dict[str, Any]) -> Iterator[Any]:
    """What a piece of source names of a module's content, and of that of modules there."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # a lambda in the middle of a line: what it calls stands in the line
        nodes = []
    for node in nodes:
        if isinstance(node, ast.Name):
            yield there.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = there.get(node.value.id)
            yield getattr(module, node.attr, None) if isinstance(module, ModuleType) else None
