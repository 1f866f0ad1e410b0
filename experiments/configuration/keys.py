"""The keys that exist for the chosen options, and what is wrong with a key or a value that OmegaConf refuses.

Errors are one line with the key as typed and the nearest existing key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import BooleanNode, DictConfig, EnumNode, FloatNode, IntegerNode, ListConfig, StringNode
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)

from experiments.configuration.config import GROUPS, Root, whole_class
from experiments.configuration.options import CONF, OVERLAYS, Library, is_group, needed_by, pairs_in, read_option
from experiments.configuration.policies import POLICIES
from experiments.configuration.settings import GONE
from testbed.errors import ConfigError
from testbed.foreign_text import NEAR, unknown

PLAIN = tuple(item.name for item in fields(Root) if item.name not in GROUPS)  # keys outside groups
_KINDS: dict[Any, str] = {  # what a value must be, by the node that refuses it; an item of a list: by its type
    **dict.fromkeys((IntegerNode, int), "a whole number"),
    **dict.fromkeys((FloatNode, float), "a number"),
    **dict.fromkeys((BooleanNode, bool), "true or false"),
    **dict.fromkeys((StringNode, str), "a string"),
}
_LISTS = {  # example values of keys that hold a list
    "trace.transforms": "[{name: thin, fraction: 0.5}]",
    "trace.tenants": "[{name: chat, share: 2}, {name: batch}]",
    "report.plots": "[{_target_: mine.waiting}]",
    "report.metrics": "[queueing_s.p99]",
}
_DEFINING = {  # keys without a default: a model or device file must give them
    "model": ("architecture", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
    "device": ("kind", "memory_bytes", "memory_bytes_per_s", "flops_per_s"),
}  # fmt: skip
_NAMED = ("model", "device", "scheduler")  # groups whose options have names: runs, fits and tables go by them
_FEW = 7  # an option with up to this many keys is told with them
_PACKAGE = re.compile(r"^# *@package +(\S+)", re.MULTILINE)
_OVERRIDDEN = re.compile(rf"override +/({'|'.join(GROUPS)}|hydra/\w+)")


@dataclass(frozen=True)
class Keys:
    """The keys that exist when these options are chosen; None is an option whose keys are not known here."""

    library: Library
    options: dict[str, list[str | None]]

    @cached_property
    def all(self) -> list[str]:
        """All dotted keys, using the first chosen option of each group."""
        return [*(key for group in GROUPS for key in self.library.keys(group, self.options[group][0])), *PLAIN]

    def has(self, key: str) -> list[bool]:
        """Whether each chosen option of the key's group has the key. A user's class has the keys in its file."""
        group = key.partition(".")[0]
        return [option is None or _is_among(key, self.library.keys(group, option)) for option in self.options[group]]

    def own_files(self) -> Iterator[tuple[str, str, Path]]:
        """Yields (group, option, file) for each chosen option that is a file of the user's own."""
        for group, option in ((group, option) for group, options in self.options.items() for option in options):
            file = None if option is None else self.library.file(group, option)
            if option is not None and file is not None and not file.is_relative_to(CONF):
                yield group, option, file

    def unnamed(self) -> Iterator[tuple[str, str]]:
        """Yields (group, option) for each model, device or scheduler file of the user's own for which neither the file
        nor an overlay gives a name: theirs is the option's, not that of the one that they begin with."""
        own = [*self.own_files()]
        files = tuple(f"{file}, line " for _, _, file in own)
        for group, option, _ in own:
            places = [self.places.get(f"{group}.{key}", ("", ""))[0] for key in ("name", "path", "_target_")]
            if group in _NAMED and not any(place.startswith(files) for place in places):
                yield group, option

    def refuse_gaps(self) -> None:
        """Raises ConfigError for a model or device file that lacks a defining key: it would get another one's value."""
        for group, option, file in self.own_files():
            said = {key for _, content in self.library.files(group, option) for key in content}
            missing = [key for key in _DEFINING.get(group, ()) if key not in said]
            if missing and "_target_" not in said and not {"path", "defaults"} <= said:
                begin = f"[{Library().names(group)[0]}, _self_]"
                raise ConfigError(
                    f"{file} lacks {', '.join(missing)}; give each a line, or begin with an option that has them, as "
                    f"defaults: {begin}"
                )

    def refuse_hidden(self) -> None:
        """Raises ConfigError for a shipped option that is also a file of the user's own, if it is chosen or a file of
        the user's begins with it: only one of the two would be it."""
        chosen = ((group, option) for group, options in self.options.items() for option in options if option)
        own = ((one[0], text) for one in self.own_files() for _, text in self.library.files(*one[:2]))
        for group, option in chain(chosen, (pair for there, text in own for pair in needed_by(text, there))):
            if (file := self.library.hidden(group, option)) is not None:
                raise ConfigError(
                    f"{file}: {group}={option} is the shipped option of that name; give the file another one"
                )

    def refuse_bases(self) -> None:
        """Raises ConfigError for a file of the user's own whose defaults name an option that does not exist, one that
        comes after the file's own keys (it would replace them), or one of another of our groups not as overlays do."""
        for group, option, _ in self.own_files():
            for file, content in self.library.files(group, option):
                if "_self_" in [one for one in content.get("defaults", ()) if isinstance(one, str)][:-1]:
                    raise ConfigError(f"{file}: what follows _self_ in its defaults replaces its own keys; put it last")
                for key, name in pairs_in(content):
                    there = key.rpartition(" ")[2].partition("@")[0].lstrip("/")
                    if not is_group(there) and self.library.names(there):
                        continue  # a group of the user's own
                    if group != OVERLAYS or not isinstance(name, str) or not _OVERRIDDEN.fullmatch(key):
                        how = "override /scheduler: sarathi" if group == OVERLAYS else "[vllm_v1, _self_]"
                        raise ConfigError(f"{file}: its defaults have {key}: {name}; name options as {how}")
                for there, name in needed_by(content, group):
                    if not (self.library.has(there, name) or name in self.library.names(there)):
                        said = f"{file}: its defaults name {there}={name}, which does not exist"
                        raise ConfigError(unknown(said, name, self.library.names(there)))

    def place_of(self, said: str, items: Sequence[Override]) -> str:
        """Returns where the key that an error begins with is set, if that is a file of the user's own and no override
        sets it."""
        key = said.partition(" is ")[0]
        is_given = any(_is_among(item.key_or_group, [key]) for item in items)
        return "" if is_given or key not in self.places else self.places[key][0]

    def check_packages(self) -> None:
        """Raises ConfigError for an overlay of the user's own without its first line, and for another file with it that
        begins with an option of its group: that would be laid on the whole."""
        for group, _, file in self.own_files():
            begins = needed_by(read_option(file), group)  # raises an error if it is not YAML
            package = _PACKAGE.findall(file.read_text(encoding="utf-8"))[:1]
            if group == OVERLAYS and not package:
                raise ConfigError(f"{file}: an overlay begins with the line '# @package _global_'")
            if group in GROUPS and begins and package == ["_global_"]:
                raise ConfigError(f"{file}: its keys are those of {group}; leave out its # @package line")

    @cached_property
    def places(self) -> dict[str, tuple[str, str]]:
        """("<file>, line <n>: ", value as written) of each dotted key in the chosen files of the user's own."""
        places: dict[str, tuple[str, str]] = {}
        for group, option, _ in self.own_files():
            for file in (file for file, _ in self.library.files(group, option) if not file.is_relative_to(CONF)):
                text = file.read_text(encoding="utf-8")
                package = (_PACKAGE.findall(text) or ["_group_"])[0]
                prefix = {"_global_": "", "_group_": f"{group}."}.get(package, f"{package}.")
                lines = _lines(yaml.compose(text, Loader=yaml.SafeLoader), prefix)
                places |= {key: (f"{file}, line {line}: ", value) for key, line, value in lines}
        return places

    def mistake(self, error: OmegaConfBaseException, items: Sequence[Override]) -> str:
        """Returns what is wrong with a key or a value that OmegaConf refused, in one line; empty for other errors.

        items: the overrides that may be the cause; if none is, a file of the user's own is.
        """
        key, shown, place = error.full_key or "", str(error.value), ""
        if isinstance(error, ConfigTypeError):  # it does not say what the value is
            shown = "{…}" if isinstance(error.parent_node, ListConfig) else "[…]"
        item = next((item for item in items if _is_among(item.key_or_group, [key])), None)
        if item is None:
            if not key:  # OmegaConf does not say where there is a single value in place of a group of keys
                groups = {name.rpartition(".")[0] for name in self.all}
                mixed = groups if not isinstance(error, ConfigTypeError) else _LISTS  # or of keys in place of a list
                values = ((name, text) for name, (_, text) in self.places.items() if name in mixed)
                key, shown = next((one for one in values if bool(one[1]) == (mixed is groups)), ("", ""))
            places = (place for name, (place, _) in self.places.items() if _is_below(name, key.partition("[")[0]))
            place = next(places, "")
        elif item.key_or_group == key:
            shown = str(item.input_line).partition("=")[2]
        typed = key if item is None else max(key, item.key_or_group, key=len)  # it may be below what OmegaConf reached
        if isinstance(error, ConfigAttributeError | ConfigKeyError):
            first, dot, rest = str(error.key).partition(".")
            if dot:
                return f"{place}unknown key {typed!r}; there a key is below its group, as {first}: {{{rest}: …}}"
            if item is None and not place:  # nobody typed it
                place = "".join(f"{OVERLAYS}={one}: " for one in self.options.get(OVERLAYS, []) if one)
            return place + self._unknown(typed, key.rpartition(".")[0], error.parent_node)
        if isinstance(error, InterpolationResolutionError) or not isinstance(error, ValidationError | ConfigTypeError):
            return ""
        if typed != key:
            return f"unknown key {typed!r}; {key} has no keys of its own"
        said = _refused(error, key, shown)
        return said and place + said

    def _unknown(self, key: str, place: str, there: Any) -> str:
        """Returns what is wrong with a key that does not exist: which option has it, or which keys exist. there: the
        node at `place` in which it was sought."""
        if key in GONE:
            return f"{key} {GONE[key]}; leave it out"
        own = [str(name) for name in there if name != "_target_"] if place else [*GROUPS, *PLAIN]
        top, *rest = key.split(".")
        group = "/".join((top, *rest[:1])) if top == "hydra" else top
        if place in GROUPS and key == f"{place}._target_":
            return whole_class(place)
        if owners := self.library.owners(group, key):
            limits = " (trace.limit takes the first requests of a file)" if key == "trace.num_requests" else ""
            takes = [name for name in own if name != "name"] if place == group else []
            has = f"; {group}={self.options[group][0]} has: {', '.join(takes)}" if 0 < len(takes) <= _FEW else ""
            return (
                f"{key} is a key of {group}={' or '.join(owners)}; leave it out{limits}, or choose {group}={owners[0]}"
                f"{has}"
            )
        if place and not own and place not in GROUPS:
            target = "_target_: …, " if place in POLICIES else ""
            name = key.removeprefix(f"{place}.").partition(".")[0]
            return f"unknown key {key!r}; {place} is given whole, as in '{place}={{{target}{name}: …}}'"
        word, here = key.rpartition(".")[2].lower(), {name.lower(): f"{place}.{name}".lstrip(".") for name in own}
        near = [here[word]] if word in here else []
        near += [name for name in self.all if name.rpartition(".")[2] == word and top != "hydra"]
        num_words = word.count("_") + 1
        begins = {"_".join(name.split("_")[:num_words]): known for name, known in here.items()}
        near += [(begins | here)[name] for name in get_close_matches(word, begins | here, n=1, cutoff=NEAR)]
        hint = f"did you mean {near[0]!r}? " if near else ""
        if not place:
            return f"unknown key {key!r}; {hint}at the top there are: {', '.join(own)}"
        return f"unknown key {key!r}; {hint}{place} has: {', '.join(own)}"


def _lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int, str]]:
    """Yields (dotted key, line, value as written) for every key of a file; the value of a mapping is empty."""
    for name, inner in node.value if isinstance(node, yaml.MappingNode) else ():
        if name.value == "<<":
            yield from _lines(inner, prefix)
            continue
        text = inner.value if isinstance(inner, yaml.ScalarNode) else "[…]" * isinstance(inner, yaml.SequenceNode)
        yield f"{prefix}{name.value}", name.start_mark.line + 1, text
        yield from _lines(inner, f"{prefix}{name.value}.")


def _is_among(key: str, names: list[str]) -> bool:
    """Whether `names` has the key, one of its parents, or one of its children."""
    return any(_is_below(name, key) or _is_below(key, name) for name in names)


def _is_below(key: str, parent: str) -> bool:
    return f"{key}.".startswith(f"{parent}.")


def _refused(error: OmegaConfBaseException, key: str, shown: str) -> str:
    """Returns what the value of a key must be, by the node that refused it; empty for a node that we do not know."""
    is_merged = isinstance(error, ConfigTypeError)  # a mapping into a list, or the reverse
    node: Any = error.parent_node if is_merged else error.child_node
    if is_merged and key in _LISTS and not error.full_key:
        node, shown = ListConfig([]), "{…}"
    elif isinstance(node, DictConfig) or not error.full_key:
        return f"{key} is {shown!r}; it is a group of keys: set one as {key}.<key>=<value>" if key else ""
    if error.value is None and not is_merged:
        return f"{key} is null; it must have a value"
    if isinstance(node, ListConfig):
        example = f"{key}={_LISTS.get(key, '[a, b]')}"
        return f"{key} is {shown!r}; it must be a list, as in '{example}' (quoted for the shell)"
    if isinstance(node, EnumNode):
        return f"{key} is {shown!r}; it must be one of: {', '.join(node.enum_type.__members__)}"
    kind: Any = type(node)
    if isinstance(error.parent_node, ListConfig):
        key, kind = f"an item of {key.rpartition('[')[0]}", get_args(error.ref_type)[0]
    digits = f", as {error.value:.0f}" if isinstance(error.value, float) and error.value.is_integer() else ""
    return f"{key} is {shown!r}; it must be {_KINDS[kind]}{digits}" if kind in _KINDS else ""
