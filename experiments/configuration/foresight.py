"""Detects user classes that read the future length of an output, which only oracles may know."""

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
    """Returns the attribute by which these functions and classes, or other user code that they call, read the future
    length; empty if none does. Follows names in the same module and in modules that it imports."""
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
    """Returns the source of a user's function or class; empty if it is not the user's or has no source. packages: the
    user's packages, whose code counts as the user's even if it is installed."""
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
    """Yields the objects that a piece of source names: in its module's namespace `there`, and in modules in it."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # a lambda in the middle of a line: its source is searched, but names in it are not followed
        nodes = []
    for node in nodes:
        if isinstance(node, ast.Name):
            yield there.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = there.get(node.value.id)
            yield getattr(module, node.attr, None) if isinstance(module, ModuleType) else None
