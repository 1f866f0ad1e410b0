"""Converts the components' frozen dataclasses to editable structured configs for Hydra, and back.

OmegaConf makes a frozen dataclass read-only and does not support Literal, so Hydra gets an editable twin of each
component's config. `freeze` turns a resolved node into the component's own dataclass, which validates itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache, partial
from types import GenericAlias, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from testbed.checks import choose, require, require_type
from testbed.errors import ConfigError, RequestError

T = TypeVar("T")
_hints = cache(get_type_hints)  # get_type_hints compiles every annotation, and each class is needed several times


def editable(*classes: type, without: Collection[str] = ()) -> Any:
    """Returns an instance of an editable twin with the fields and defaults of all classes; later classes win. without:
    fields to leave out."""
    collected: dict[str, tuple[str, Any, Any]] = {}
    for cls in classes:
        hints = _hints(cls)
        for item in fields(cls):
            if item.name in without:
                continue
            default = item.default if item.default is not MISSING else None
            if item.default_factory is not MISSING:
                default = item.default_factory()
            collected[item.name] = (item.name, *_twin(_plain(hints[item.name]), default))
    return _made(classes[-1].__name__, list(collected.values()))()


def _made(name: str, attributes: list[tuple[str, Any, Any]]) -> type:
    # any docstring will do: OmegaConf reads only the fields, and without one dataclass builds one from the signature,
    # which takes as long as everything else
    return make_dataclass(name, attributes, namespace={"__doc__": editable.__doc__}, repr=False, eq=False)


def _twin(kind: Any, default: Any) -> tuple[Any, Any]:
    if is_dataclass(default) and not isinstance(default, type):
        pairs = [(item.name, getattr(default, item.name)) for item in fields(default)]
        hints = _hints(type(default))
        nested = _made(type(default).__name__, [(name, *_twin(_plain(hints[name]), value)) for name, value in pairs])
        return nested, field(default_factory=nested)
    if isinstance(default, tuple):
        return kind, field(default_factory=partial(list, default))
    if default is None and kind is not Any:
        kind = kind | None
    return kind, field(default=default)


def _plain(hint: Any) -> Any:
    """Returns the type hint in terms of types that OmegaConf supports."""
    if hint is Any:
        return Any
    origin = get_origin(hint)
    if origin is Literal:
        return str
    if origin is tuple:
        first = get_args(hint)[0]
        return GenericAlias(list, (Any if get_origin(first) is tuple else first,))
    if origin in (Union, UnionType):
        args = [_plain(arg) for arg in get_args(hint) if arg is not NoneType]
        if len(args) > 1 or is_dataclass(args[0]):
            return Any  # an optional nested config is set as a whole: key={a: 1, b: 2}
        return args[0] | None if len(args) != len(get_args(hint)) else args[0]
    return hint


def freeze(cls: type[T], group: str, values: dict[str, Any]) -> T:
    """Makes the component's dataclass from a resolved node. Keys that are not its fields are ignored.

    Raises ConfigError with `group.key` for a value that a Literal does not allow, for another value in place of a list
    or of a group, and for a key that must be given; the class checks all other values.
    """
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable
    chosen: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]  # every cls here is a dataclass
        key, hint = f"{group}.{item.name}", hints[item.name]
        if item.name not in values:
            if item.default is MISSING and item.default_factory is MISSING:
                raise ConfigError(f"{key} is missing; give it a value")
            continue
        value = values[item.name]
        if get_origin(hint) is Literal:
            choose(key, value, get_args(hint))
        elif value is not None and (kind := _group_in(hint)) is not None:
            value = _freeze_whole(kind, key, value)
        elif get_origin(hint) is tuple:  # OmegaConf does not check what an interpolation gives for a list
            require(key, value, isinstance(value, list | tuple), "a list")
            value = tuple(value)
        chosen[item.name] = value
    try:
        return cls(**chosen)
    except RequestError as error:
        raise ConfigError(str(error)) from None


@cache
def _group_in(hint: Any) -> type | None:
    return next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)


def _freeze_whole(cls: type[T], group: str, values: Any) -> T:
    """Like freeze, for a node that belongs to this class only: raises ConfigError for keys that are not its fields, and
    for another value in place of such a node."""
    names = [item.name for item in fields(cls)]  # type: ignore[arg-type]  # every cls here is a dataclass
    require(group, values, isinstance(values, dict), f"a group with keys of {', '.join(names)}")
    hints = get_type_hints(cls)
    for key, value in values.items():
        choose(f"a key of {group}", key, tuple(names))
        hint = hints[key]
        if get_origin(hint) is not Literal and _group_in(hint) is None:
            require_type(f"{group}.{key}", value, hint)
    try:
        return freeze(cls, group, values)
    except ConfigError as error:
        said = str(error)
        raise ConfigError(f"{group}.{said.removeprefix('lengths.')}" if said.startswith("lengths.") else said) from None
