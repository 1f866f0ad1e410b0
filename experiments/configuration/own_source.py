"""The source of user classes, and of what they call; detects those that read the future length of an output, which
only oracles may know, or draw or ask the time in ways that no seed sets."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from textwrap import dedent
from types import FunctionType, ModuleType
from typing import Any

_TELLING = re.compile(r"\.(forced_output|token_limit|foreseen_end|first_tokens|next_tokens|_content)\b")
_OURS = ("testbed", "sim", "real", "experiments", "analysis", "builtins")
_LIBRARY = sysconfig.get_path("stdlib")
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_SHARED = (("random", "random", "_inst"), ("numpy.random", "numpy.random.mtrand", "_rand"))
VALUES = (int, float, str, tuple, list, dict)  # two names may have one of these


def foresight_of(*made: Any) -> str:
    """Returns the attribute by which these functions and classes, or other user code that they call, read the future
    length; empty if none does."""
    return next((read[1] for _, source in reached(*made) if (read := _TELLING.search(source)) is not None), "")


def unseeded_in(*made: Any) -> str:
    """Returns the function by which these functions and classes, or other user code that they call, draw without the
    run's seed, by a generator that modules share and that they do not seed, or ask the clock; empty if none does."""
    named = [one for one, source in reached(*made) if not source]
    seeded = {_drawer(one) for one in named if getattr(one, "__name__", "") == "seed"}
    return next((name for one in named if (name := _undetermined(one)) and _drawer(one) not in seeded), "")


def _undetermined(one: Any) -> str:
    module, name = getattr(one, "__module__", None), getattr(one, "__name__", "")
    is_clock = module == "time" and name.removesuffix("_ns") in _CLOCKS
    return f"{_drawer(one) or module}.{name}" if is_clock or module == "secrets" or _drawer(one) else ""


def _drawer(one: Any) -> str:
    """Returns the module whose shared generator a function is a method of."""
    of = getattr(one, "__self__", None)
    shared = {name: getattr(sys.modules.get(module), attribute, None) for name, module, attribute in _SHARED}
    return next((name for name, generator in shared.items() if of is not None and of is generator), "")


def reached(*made: Any) -> Iterator[tuple[Any, str]]:
    """Yields these functions and classes, and what they name, each with its source; "" if it is none of the user's, or
    has none. Follows names in the same module and in modules that it imports."""
    todo, seen = list(made), set()
    packages = {_package(part) for one in made for part in (one, *_bases(one))}
    while todo:
        one = todo.pop()
        if id(one) in seen and not isinstance(one, VALUES):
            continue
        seen.add(id(one))
        source = _own_source(one, packages)
        yield one, source
        module = sys.modules.get(str(getattr(one, "__module__", None)), sys)
        todo += [*_bases(one), *(_named(source, vars(module)) if source else ())]


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
        return _of_cell(one)


def _of_cell(one: Any) -> str:
    """Returns the source of a class that a notebook's cell defines, where its methods are from; empty for others."""
    parts = [getattr(part, "__func__", part) for part in vars(one).values()] if isinstance(one, type) else []
    for method in (part for part in parts if isinstance(part, FunctionType)):
        lines = linecache.getlines(method.__code__.co_filename)
        with suppress(SyntaxError):
            for node in ast.walk(ast.parse("".join(lines))):
                if isinstance(node, ast.ClassDef) and node.name == one.__name__:
                    first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
                    return dedent("".join(lines[first - 1 : node.end_lineno]))
    return ""


def _named(source: str, there: dict[str, Any]) -> Iterator[Any]:
    """Yields the objects that a piece of source names: in its module's namespace `there`, and in modules in it."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # a lambda in the middle of a line: its source is searched, but names in it are not followed
        nodes = []
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield _object(node, there)


def _object(node: ast.expr, there: dict[str, Any]) -> Any:
    """Returns what a name stands for, or a dotted name that leads through modules; else None."""
    if isinstance(node, ast.Name):
        return there.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    module = _object(node.value, there)
    return getattr(module, node.attr, None) if isinstance(module, ModuleType) else None
