"""The keys that exist for the chosen options: checks that a key exists and that a value has the key's type.

Errors are one line with the key as typed and the nearest existing key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from hydra.conf import HydraConf
from omegaconf import BooleanNode, FloatNode, IntegerNode, StringNode
from omegaconf.errors import ValidationError

from experiments.configuration.config import GROUPS, Root
from experiments.configuration.options import (
    CONF,
    OVERLAYS,
    Library,
    Schema,
    all_options,
    dotted,
    fields_of,
    is_group,
    is_optional,
    nested,
    plain,
    read_option,
)
from experiments.configuration.policies import GROUPS as POLICIES
from experiments.configuration.settings import GONE
from testbed.errors import ConfigError
from testbed.foreign_text import NEAR

PLAIN = tuple(item.name for item in fields(Root) if item.name not in GROUPS)  # keys outside groups
_KINDS: dict[Any, tuple[Any, str]] = {
    int: (IntegerNode, "a whole number"),
    float: (FloatNode, "a number"),
    bool: (BooleanNode, "true or false"),
    str: (StringNode, "a string"),
}
_LISTS = {  # example values of keys that hold a list
    "trace.transforms": "[{name: thin, fraction: 0.5}]",
    "trace.tenants": "[{name: chat, share: 2}, {name: batch}]",
}
_DEFINING = {  # keys without a default: a model or device file must give them
    "model": ("name", "architecture", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
    "device": ("name", "kind", "memory_bytes", "memory_bytes_per_s", "flops_per_s"),
}  # fmt: skip
_PACKAGE = re.compile(r"^# *@package +(\S+)", re.MULTILINE)
_TAKEN = re.compile(r"(?<!\\)\$\{(\w[\w.]*)\}")  # keys that a text interpolates


@dataclass(frozen=True)
class Keys:
    """The keys that exist when these options are chosen."""

    library: Library
    options: dict[str, list[str | None]]

    @cached_property
    def all(self) -> list[str]:
        """All dotted keys, using the first chosen option of each group."""
        schemas = [(group, self._schemas(group)[0]) for group in GROUPS]
        return [*(key for group, schema in schemas for key in dotted(schema, group)), *PLAIN]

    def _schemas(self, group: str) -> list[Schema | None]:
        return [None if name is None else self.library.schema(group, name) for name in self.options[group]]

    def has(self, key: str) -> list[bool]:
        """Whether each chosen option of the key's group has the key. A user's class has the keys in its file."""
        group = key.partition(".")[0]
        found = []
        for option, schema in zip(self.options[group], self._schemas(group), strict=True):
            contents = () if option is None else self.library.contents(group, option)
            said = [name for content in contents for name, _ in _items(content, f"{group}.")]
            found.append(option is None or _is_among(key, dotted(schema, group) if schema is not None else said))
        return found

    def check_file(self, group: str, option: str | None) -> None:
        """Checks the values of an option's file if it is the user's own. Raises ConfigError with file and line."""
        file = None if option is None else self.library.file(group, option)
        if file is None or file.is_relative_to(CONF):
            return
        if group not in (*GROUPS, OVERLAYS) or "_target_" in read_option(file):
            return
        content, text = read_option(file), file.read_text(encoding="utf-8")
        packages = {"_global_": "", "_group_": f"{group}.", group: f"{group}."}
        named = _PACKAGE.search(text)
        prefix = packages.get(named[1] if named else "_group_")
        if prefix is None:
            return  # another package: errors are left to Hydra
        if prefix == f"{OVERLAYS}.":
            raise ConfigError(f"{file}: an overlay begins with the line '# @package _global_'")
        content.pop("defaults", None)
        lines = dict(_lines(yaml.compose(text, Loader=yaml.SafeLoader), ""))
        alone = replace(self, options=self.options | ({group: [option]} if group in GROUPS else {}))
        self._mappings.update(prefix + key for key, value in _items(content, "") if isinstance(value, dict))
        for key, value in _items(content, ""):
            if isinstance(value, dict):
                continue
            try:
                alone.check_value(prefix + key, value, str(value), is_added=False)
            except ConfigError as error:
                raise ConfigError(f"{file}, line {_line_of(key, lines)}: {error}") from None
        self._refuse_gaps(group, option or "", file)

    def _refuse_gaps(self, group: str, option: str, file: Path) -> None:
        """Raises ConfigError for a model or device file that lacks a defining key: it would get another one's value."""
        said = {key for content in self.library.contents(group, option) for key in content}
        missing = [key for key in _DEFINING.get(group, ()) if key not in said]
        if missing and "path" not in said:
            begin = f"[{self.library.names(group)[0]}, _self_]"
            raise ConfigError(
                f"{file} lacks {', '.join(missing)}; give each a line, or begin with an option that has them, as "
                f"defaults: {begin}"
            )

    @cached_property
    def _mappings(self) -> set[str]:
        """Dotted keys that hold mappings, in the files of the chosen options or in values checked since."""
        return {
            key
            for group, options in self.options.items()
            for option in options
            for content in (() if option is None else self.library.contents(group, option))
            for key, value in _items(content, "" if group == OVERLAYS else f"{group}.")
            if isinstance(value, dict)
        }

    def check_value(self, key: str, value: Any, shown: str, *, is_added: bool) -> None:
        """Raises ConfigError if there is no such key, or if the value has another type."""
        top, *path = key.split(".")
        if top == "hydra":
            schemas: list[Schema | None] = [HydraConf]
            if len(path) > 1 and path[0] in ("launcher", "sweeper"):
                group = f"hydra/{path[0]}"
                schemas = self._schemas(group)
                top, path = f"hydra.{path[0]}", path[1:]
        elif top in GROUPS:
            schemas, has = self._schemas(top), self.has(key)
            if any(has):  # in a sweep, options that lack the key are run without it
                schemas = [schema for schema, one in zip(schemas, has, strict=True) if one]
        elif top in PLAIN:
            schemas, top, path = [Root], "", [top, *path]
        else:
            raise self._unknown(key)
        for schema in schemas:
            if schema is not None:
                self._check_in(schema, top, path, value, shown, is_added=is_added)

    def _check_in(self, schema: Schema, place: str, path: list[str], value: Any, shown: str, *, is_added: bool) -> None:
        if not path:
            for name, inner in value.items() if isinstance(value, dict) else ():
                self._check_in(schema, place, [str(name)], inner, str(inner), is_added=is_added)
            return
        name, *rest = path
        key, kinds = f"{place}.{name}".lstrip("."), fields_of(schema)
        if name not in kinds:
            if not is_added:
                raise self._unknown(".".join((key, *rest)), schema, place)
            return
        kind = kinds[name]
        inner_schema = nested(kind)
        if inner_schema is not None and not (value is None and is_optional(kind)):
            if not rest and not isinstance(value, dict) and "${" not in shown:
                raise ConfigError(f"{key} is {shown!r}; it is a group of keys: set one as {key}.<key>=<value>")
            self._check_in(inner_schema, key, rest, value, shown, is_added=is_added)
        elif rest:
            whole = f"unknown key '{'.'.join((key, *rest))}'; {key}"
            if kind is not Any and get_origin(plain(kind)) is not dict:
                raise ConfigError(f"{whole} has no keys of its own")
            if kind is Any and isinstance(schema, type) and not is_added and key not in self._mappings:
                target = "_target_: …, " if key in POLICIES else ""
                raise ConfigError(f"{whole} is given whole, as in '{key}={{{target}{rest[0]}: …}}'")
            self._mappings.add(key)
        else:
            if kind is Any and isinstance(value, dict):
                self._mappings.add(key)
            self._check_taken(key, value)
            _check_type(key, kind, value, shown)

    def _check_taken(self, key: str, value: Any) -> None:
        """Raises ConfigError if a value interpolates a key that does not exist."""
        for taken in _TAKEN.findall(value) if isinstance(value, str) else ():
            group = taken.partition(".")[0]
            if group == "hydra" or (group in GROUPS and None in self._schemas(group)):
                continue  # keys of a user's class are not known here
            if not _is_among(taken, self.all):
                raise ConfigError(
                    f"{key} has ${{{taken}}}, and there is no key {taken!r} to take the value of; name one, as "
                    f"${{seed}}, or write \\${{{taken}}} for the text itself"
                )

    def _unknown(self, key: str, schema: Schema | None = None, place: str = "") -> ConfigError:
        """Returns the error for a key that does not exist: which option has it, or which keys exist."""
        if key in GONE:
            return ConfigError(f"{key} {GONE[key]}; leave it out")
        if key.endswith("._target_") and place in GROUPS:
            return ConfigError(
                f"{key}: {place} is a whole group, so a class of your own for it goes into a file of your own folder, "
                f"as my_conf/{place}/mine.yaml; choose it with --config-dir=my_conf {place}=mine (docs/extending.md)"
            )
        top = key.partition(".")[0] if not place.startswith("hydra.") else place
        group = top.replace(".", "/")
        owners = [
            option
            for option, other in (all_options(group) if is_group(group) else {}).items()
            if other is not None and key in dotted(other, top)
        ]
        if owners:
            of = f"{key} is a key of {group}={' or '.join(owners)}"
            limits = " (trace.limit takes the first requests of a file)" if key == "trace.num_requests" else ""
            return ConfigError(f"{of}; leave it out{limits}, or choose {group}={owners[0]}")
        own = [name for name in (() if schema is None else fields_of(schema)) if name != "_target_"]
        known = [f"{place}.{name}" for name in own] if top.partition(".")[0] == "hydra" else self.all
        names = [*GROUPS, *known] if "." not in key else known
        near = max(names, key=lambda name: _similarity(key, name), default="")
        hint = f"did you mean {near!r}? " if _similarity(key, near)[0] >= NEAR else ""
        if schema is None or not place:
            tops = dict.fromkeys(name.partition(".")[0] for name in known)
            return ConfigError(f"unknown key {key!r}; {hint}at the top there are: {', '.join(tops)}")
        has = f"has: {', '.join(own)}" if own else "has no keys"
        return ConfigError(f"unknown key {key!r}; {hint}{place} {has}")


def _similarity(key: str, known: str) -> tuple[float, float]:
    """Returns how similar two keys are, from 0 to 1, and their similarity as a whole, for ties.

    Keys of one group must be similar without it, too, or the key must resemble as many of the other's first words. In a
    key without a group, the group may have been forgotten.
    """
    from difflib import SequenceMatcher  # seldom needed

    own, other = (name.partition(".")[2] or name for name in (key, known))
    whole = SequenceMatcher(None, known, key).ratio()
    if own == key:
        return (1.0 if own == other else whole), whole
    begin = "_".join(other.split("_")[: own.count("_") + 1])
    apart = max(SequenceMatcher(None, name, own).ratio() for name in (other, begin))
    return min(whole, apart), whole


def _is_among(key: str, names: list[str]) -> bool:
    """Whether `names` has the key, one of its parents, or one of its children."""
    return any(f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.") for name in names)


def _items(content: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every value of a file; a mapping comes before its own values."""
    for name, value in content.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from _items(value, f"{prefix}{name}.")


def _lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """Yields (dotted key, line) for every key of a file."""
    for name, inner in node.value if isinstance(node, yaml.MappingNode) else ():
        yield f"{prefix}{name.value}", name.start_mark.line + 1
        yield from _lines(inner, f"{prefix}{name.value}.")


def _line_of(key: str, lines: dict[str, int]) -> int:
    """Returns the line of a key; for one that comes from a YAML merge (`<<: *name`), the line of its parent."""
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return lines.get(key, 1)


def _check_type(key: str, kind: Any, value: Any, shown: str) -> None:
    """Raises ConfigError if OmegaConf cannot convert a value to the key's type."""
    if kind is Any or (isinstance(value, str) and "${" in value):
        return
    if value is None:
        if not is_optional(kind):
            raise ConfigError(f"{key} is null; it must have a value")
        return
    kind, may_be_absent = plain(kind), is_optional(kind)
    if get_origin(kind) is list:
        if not isinstance(value, list | tuple):
            example = f"{key}={_LISTS.get(key, '[a, b]')}"
            raise ConfigError(f"{key} is {shown!r}; it must be a list, as in '{example}' (quoted for the shell)")
        for item in value:
            _check_type(f"an item of {key}", get_args(kind)[0], item, str(item))
    elif isinstance(kind, type) and issubclass(kind, Enum):
        if str(value) not in kind.__members__:
            raise ConfigError(f"{key} is {shown!r}; it must be one of: {', '.join(kind.__members__)}")
    elif kind in _KINDS:
        node, wanted = _KINDS[kind]
        if value == "" and may_be_absent:
            raise ConfigError(f"{key} has no value; give one, or null for none")
        if kind is bool and isinstance(value, int) and value not in (0, 1):  # OmegaConf reads it as true
            raise ConfigError(f"{key} is {shown!r}; it must be {wanted}")
        try:
            node(value)
        except ValidationError:
            digits = f", as {value:.0f}" if isinstance(value, float) and value.is_integer() else ""
            raise ConfigError(f"{key} is {shown!r}; it must be {wanted}{digits}") from None
        except OverflowError:
            raise too_large(f"{key}={shown}") from None


def too_large(override: str) -> ConfigError:
    """Returns the error for an integer that is too large for a float, where a number is expected."""
    cut = override if len(override) <= 80 else override[:77] + "..."
    return ConfigError(f"{cut}: it must be a number that fits a float")
