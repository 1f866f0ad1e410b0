"""Makes an object of the class that a configuration names by `_target_`, and says why it cannot: in one line, with the
user's file and line where the failure is in the user's code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from inspect import Parameter, iscoroutinefunction, isgeneratorfunction, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from testbed.checks import require_type
from testbed.errors import ConfigError, TestbedError
from testbed.foreign_text import nearest, unknown, visible

ROOMS = ("testbed", "sim", "real", "experiments", "analysis")
ROOT = Path(__file__).parents[2]


def instantiate(key: str, node: dict[str, Any], **arguments: Any) -> Any:
    """Makes the object named by `_target_`; it gets Python's lists and dicts unless `_convert_` says otherwise. A whole
    group's `name` is what runs call it, if the class has no such parameter. Raises ConfigError with a one-line
    message."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate
    from omegaconf.errors import OmegaConfBaseException

    target = str(node.get("_target_"))
    if "." not in target or not all(map(str.isidentifier, target.split("."))):
        raise ConfigError(f"{key}._target_ is {target!r}; it must be a module and a class in it, as mine.Class")
    values = {"_convert_": "all"} | node
    if "name" in node and "." not in key and "name" not in (parameters(target) or ()):
        del values["name"]
    if said := _hides_own(target):
        raise ConfigError(f"{key}: {said}")
    for name in _switches(target).intersection(values):
        require_type(f"{key}.{name}", values[name], bool)
    try:
        return hydra_instantiate(values, **arguments)
    except (InstantiationException, OmegaConfBaseException) as error:
        if isinstance(error.__cause__, TestbedError):
            raise error.__cause__ from None
        said = told(error.__cause__) if error.__cause__ else visible(" ".join(str(error).split()))
        reason = missing_name(target) or _failure(error, target) or stray(target, values) or said
        raise ConfigError(f"{key}: cannot make {target!r}: {reason}") from None
    except SystemExit as error:
        raise ConfigError(f"{key}: {target!r} ends Python (SystemExit {error}); mend it") from None


def imported(key: str, target: str) -> Any:
    """Returns what a dotted name is of. Raises ConfigError if it cannot be imported."""
    if said := _hides_own(target):
        raise ConfigError(f"{key}={target}: {said}")
    try:
        return resolve_name(target)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever a user's module raises when it is imported)
        reason = missing_name(target) or told(error)
        raise ConfigError(f"{key}={target} cannot be imported ({reason}); mend it, or name another class") from None


def _hides_own(target: str) -> str:
    """Returns the error text if a module from elsewhere hides one of its name in this directory, which is searched
    last; empty if none does, or if it is beside the script that runs."""
    top = target.partition(".")[0]
    own = next((file for file in (Path(f"{top}.py"), Path(top, "__init__.py")) if file.is_file()), None)
    if own is None or top in ROOMS:
        return ""
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return ""
    there = Path((spec and spec.origin) or "Python's own")
    is_script = there.parent == Path(sys.path[0]).absolute()
    if is_script or (there.exists() and there.samefile(own)):
        return ""
    return f"{top!r} is a module that is there already ({there}), and comes first; give your {own} another name"


def has_method(made: Any, name: str, key: str, target: str) -> bool:
    """Whether the object that a user's class made has a method. Raises ConfigError if the class fails to say, or if a
    call of the method would run nothing of it."""
    try:
        method = getattr(made, name, None)
    except Exception as error:  # noqa: BLE001  (what is looked up may be the user's code)
        raise ConfigError(f"{key}: {_failure(error, target) or told(error)}") from None
    if (isgeneratorfunction(method) and name != "__iter__") or iscoroutinefunction(method):
        raise ConfigError(f"{key}: {target}.{name} has a yield or is async, so that a call of it runs nothing")
    return callable(method)


def missing_name(target: str) -> str:
    """Returns the error text if a class's module does not exist or lacks the name; empty for any other problem."""
    module, _, name = target.rpartition(".")
    top = module.partition(".")[0]
    if top and top not in sys.modules and find_spec(top) is None:
        return f"there is no module {top!r} in {os.getcwd()}, or where PYTHONPATH says; run testbed where {top}.py lies"
    there = sys.modules.get(module)
    if there is None or hasattr(there, name):
        return ""
    if module == "__main__":
        return f"what a script or a notebook's cell defines is in no other process; put it in a file, as mine.{name}"
    made = [key for key, value in vars(there).items() if callable(value)]  # not the modules of a package
    return f"{module} has no {name!r}; {nearest(name, made)}".rstrip("; ")


def place_in_own_code(error: BaseException) -> str:
    """Returns the "<file>:<line>" of the user's code through which an exception came last, or an empty text."""
    others = ("site-packages", "/lib/python", "<frozen ")
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if not _is_ours(one.filename) and not any(part in one.filename for part in others)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def told(error: BaseException) -> str:
    """Returns "<type>: <message>" in one line, with escapes for what a terminal would not print."""
    try:
        said = visible(" ".join(str(error).split()))
    except Exception:  # noqa: BLE001  (a user's exception may fail to say anything)
        said = "what it says cannot be read"
    return ": ".join([type(error).__name__, *filter(None, [said])])


def _is_ours(file: Path | str) -> bool:
    return any((ROOT / file).is_relative_to(ROOT / room) for room in ROOMS)  # compiled code has paths relative to ROOT


def _failure(error: BaseException, target: str) -> str:
    """Returns what went wrong in the user's code, and where; empty if it is not to blame."""
    for one in _causes(error):
        place = place_in_own_code(one)
        if isinstance(one, SyntaxError):  # of a file that is not text it does not say which it is
            where = f"{one.filename}:{one.lineno}" if one.filename else place or _file_of(target.rpartition(".")[0])
            return f"{where}: {one.msg}; mend it there"
        if isinstance(one, ModuleNotFoundError):
            return f"there is no module {one.name!r}; install it, or correct the import"
        if place:
            return f"{place}: {told(one)}; mend it there"
    return ""


def _file_of(module: str) -> str:
    """Returns a module's file; the module's name if what it is in cannot be imported either."""
    try:
        spec = find_spec(module)
    except (ImportError, SyntaxError, ValueError):
        return module
    return (spec and spec.origin) or module


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _switches(target: str) -> set[str]:
    """Returns the parameters of a class of ours that are true or false: interpreted, it would take any value."""
    known = parameters(target) if target.partition(".")[0] in ROOMS else None
    return {name for name, item in (known or {}).items() if isinstance(item.default, bool)}


def stray(target: str, values: dict[str, Any]) -> str:
    """Returns what is wrong with a parameter that the class does not have; empty if there is none."""
    if (known := parameters(target)) is None:
        return ""
    found = next((name for name in values if name not in known and not name.startswith("_")), None)
    if found is None or any(item.kind is Parameter.VAR_KEYWORD for item in known.values()):
        return ""
    return unknown(f"it has no parameter {found!r}", found, list(known))


def parameters(target: str) -> Mapping[str, Parameter] | None:
    """Returns a class's parameters by name; None if it cannot be imported or does not tell."""
    try:
        return signature(imported("", target)).parameters
    except (ValueError, TypeError, ConfigError):
        return None
