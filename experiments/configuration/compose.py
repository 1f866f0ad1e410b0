"""Composes configurations in Python: Hydra's groups and overrides without Hydra's command line."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import MISSING, fields
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import AnyNode, DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from experiments.configuration.config import GROUPS, RunConfig, register
from experiments.configuration.grammar import literal, parsed
from experiments.configuration.keys import PLAIN, Keys
from experiments.configuration.on_device import check_device
from experiments.configuration.options import is_shipped, options
from experiments.configuration.overrides import (
    check,
    chooses,
    is_hydras,
    is_value,
    of_one_point,
    refuse_repeated,
    swept_values,
    with_searched,
)
from experiments.configuration.saved import engine_dtype, unlike_the_engine
from testbed import errors
from testbed.errors import ConfigError
from testbed.foreign_text import not_yaml, unknown
from testbed.specs.device import DeviceSpec

ONE_AT_A_TIME = threading.RLock()  # threads take turns: Hydra's state, the log and joblib's workers are the process's


def compose_config(overrides: list[str], own: Mapping[str, Any] = MappingProxyType({})) -> RunConfig:
    """Returns the configuration of `testbed run <overrides>`. own: groups that are a class of the user's, whole.
    Raises ConfigError with a one-line message."""
    config = RunConfig.from_container({**compose_raw(overrides), **own})
    check_device(overrides, config)
    return config


def compose_raw(overrides: list[str]) -> dict[str, Any]:
    """Returns the same configuration as plain containers. Raises ConfigError with a one-line message.

    Each combination of options is composed once per process; the values are set on a copy. The points of a sweep
    therefore share this work.
    """
    keys = check(overrides)
    return _resolved(_laid(_chosen(overrides, keys), overrides, keys), overrides, keys)


def check_values(overrides: Sequence[str], *, is_sweep: bool = False) -> Keys:
    """Returns the keys of the chosen options. Raises ConfigError with a one-line message for an override that Hydra's
    app could not apply. is_sweep: whether a key may have several values; of these the first is checked here, and each
    where the points are composed."""
    keys = check(overrides, is_sweep=is_sweep)
    first = [swept_values(item, keys.library)[0] for item in map(parsed, overrides) if not is_hydras(item)]
    point = of_one_point(first, keys)
    own = check(point)  # of several options only one has the file of which an error is
    _laid(_chosen(point, own), point, own)
    return keys


@contextmanager
def in_one_line(overrides: Sequence[str], keys: Keys | None = None) -> Iterator[None]:
    """Context in which errors of Hydra and OmegaConf are raised as a ConfigError with a one-line message, and our own
    about a value in a file of the user's name its line.

    overrides: what is applied here. keys: those of the chosen options, for errors of keys and values.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
        said = _line(error) + ("" if error.__cause__ is None else f": {_line(error.__cause__)}")
        named = re.match(r"In '(.+)/(.+?)': ", said)
        if keys is not None and named and (file := keys.library.file(named[1], named[2])):
            said = f"{file}: {said[named.end() :]}"
        if keys is not None and isinstance(cause, OmegaConfBaseException):
            items = [item for item in map(parsed, overrides) if not chooses(item)]
            said = keys.mistake(cause, items) or keys.place_of(str(cause.full_key), items) + said
        raise ConfigError(said) from None
    except OverflowError:
        raise ConfigError(f"{' '.join(overrides)[:77]}...: it must be a number that fits a float") from None
    except ConfigError as error:
        items = [item for item in map(parsed, overrides) if not chooses(item)]
        if place := "" if keys is None else keys.place_of(str(error), items):
            raise ConfigError(f"{place}{error}") from None
        raise


def _line(error: BaseException) -> str:
    """Returns an error as one line that begins with the key, without OmegaConf's lines about it at the end."""
    if isinstance(error, MissingMandatoryValue):
        return _missing(str(error.full_key))
    if isinstance(error, MissingConfigException):  # below its first line are all places and options
        return str(error).partition("\n")[0]
    if (mark := getattr(error, "problem_mark", None)) is not None:
        return f"{mark.name}{not_yaml(error)}"
    text, _, _ = str(error).partition("\n    full_key: ")
    kind, is_resolvers, said = text.partition(" raised while resolving interpolation: ")
    if is_resolvers and hasattr(errors, kind):
        text = said  # our own errors name the key already
    elif key := getattr(error, "full_key", ""):
        text = f"{key}: {text}"
    if text.rstrip().endswith("Recursive interpolation detected"):
        text += ": it asks for itself, maybe by way of others; give one of them a value"
    if text.endswith("' not found"):
        text += ": name a key that exists, or write \\${…} for the text itself"
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def hydra_app() -> Iterator[Any]:
    """Context in which `compose` reads our configuration; yields Hydra's app, which has `run` and `multirun`, and
    restores the caller's Hydra state afterwards."""
    register()
    with ONE_AT_A_TIME:
        before = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            with initialize_config_module("experiments.conf", version_base="1.3"):
                yield GlobalHydra.instance().hydra
        finally:
            if before is not None:
                GlobalHydra.instance().clear()
                GlobalHydra.instance().initialize(before)


def _missing(key: str) -> str:
    return f"{key} is '???', which stands for a value that is missing; give one"


def _chosen(overrides: Sequence[str], keys: Keys, before: Sequence[str] = ()) -> DictConfig:
    """Returns the configuration of the options that the overrides choose, as a copy on which values can be set. before:
    options that are chosen if the overrides choose no others. Raises ConfigError for keys of Hydra's: they are read by
    its app alone."""
    for item in (item for item in map(parsed, overrides) if is_hydras(item)):
        raise ConfigError(
            f"{item.input_line} has no effect here: Hydra's keys are of `testbed run` (with from=: hydra.run.dir); "
            "leave it out"
        )
    choices = [item for item in overrides if not is_value(item)]
    with in_one_line(choices, keys):
        node = deepcopy(_composed((*before, *choices), keys.library.stamps()))
    keys.refuse_gaps()
    for group, _, file in keys.own_files():
        _refuse_baseless(node, group, file)
    for group, option in keys.unnamed():
        OmegaConf.update(node, f"{group}.name", option, force_add=True)
    for key, (place, text) in keys.places.items():
        if key in GROUPS and OmegaConf.select(node, key) is None:
            raise ConfigError(f"{place}{key} is empty, and a run has its {key}; give it keys, or leave the line out")
        _refuse_number(node, key, text, place)
    return node


_BEGINS = {  # how a file of the user's own begins, and the keys of one that may begin otherwise
    "scheduler": ("begin with one, as defaults: [vllm_v1, _self_], or with _schema", {"_target_"}),
    "cost": ("name a class, as _target_: mine.Cost, or begin with one, as defaults: [roofline, _self_]",
             {"_target_", "name"}),
}  # fmt: skip


def _refuse_baseless(node: DictConfig, group: str, file: Path) -> None:
    """Raises ConfigError for a preset or cost model in a file of the user's own that is neither a class nor begins with
    an option of ours: its keys have no types, and those that it leaves out no values."""
    how, otherwise = _BEGINS.get(group, ("", set()))
    if how and OmegaConf.get_type(node, group) is dict and not node[group].keys() & otherwise:
        raise ConfigError(f"{file} begins with no option of {group}; {how}")


_PARTS: dict[tuple[str, str | None], DictConfig] = {}  # by group and its choice: a composition that has this part


@lru_cache(maxsize=64)
def _composed(choices: tuple[str, ...], stamps: tuple[Any, ...]) -> DictConfig:
    """Composes and caches. stamps: part of the cache key, as a user's own files may be edited between two calls. An
    option that is stored again under its name in Hydra's ConfigStore is not noticed.

    Our own options have no part in each other's groups, so that a combination of options that were composed before is
    put together from them. The user's own may have, and overlays do.
    """
    chosen = {item.partition("=")[0]: item for item in choices}
    parts = [(group, chosen.get(group)) for group in GROUPS]
    are_shipped = (group in GROUPS and is_shipped(group, item.partition("=")[2]) for group, item in chosen.items())
    is_ours = not stamps and len(chosen) == len(choices) and all(are_shipped)
    if is_ours and all(part in _PARTS for part in parts):
        node = deepcopy(_PARTS[parts[0]])
        for group, choice in parts[1:]:
            node[group] = deepcopy(_PARTS[group, choice][group])
        return node
    with hydra_app():
        node = compose("config", overrides=list(choices))
    _PARTS.update(dict.fromkeys(parts, node) if is_ours else {})
    return node


def _laid(node: DictConfig, overrides: Sequence[str], keys: Keys) -> DictConfig:
    """Sets the overrides' values on the node and returns it."""
    for text in filter(is_value, overrides):
        with in_one_line([text], keys):
            _set(node, parsed(text))
    _refuse_unread(node, overrides, keys)
    return node


def _refuse_unread(node: DictConfig, overrides: Sequence[str], keys: Keys) -> None:
    """Raises ConfigError for a key of the model beside `model.path`, whose files give all of it: in an override, or in
    a file of the user's own (except a model that a path from elsewhere replaces)."""
    if not isinstance(OmegaConf.select(node, "model.path", throw_on_missing=False), str):
        return
    given = {key: place for key, place in _beside_path(keys).items() if key in keys.all}
    for item in map(parsed, filter(is_value, overrides)):
        given |= {key: "" for key, _ in _given(item.key_or_group, item.value())}
    for key, place in given.items():
        group, _, name = key.partition(".")
        if group == "model" and name not in ("", "path"):
            raise ConfigError(
                f"{place}{key} has no effect with model.path, whose files give it: leave it out, or change it in a "
                "copy of config.json (backend.dtype sets what an engine computes in)"
            )


def _beside_path(keys: Keys) -> dict[str, str]:
    """Returns where each key is in the user's files: in those of models only if one of these gives model.path."""
    own = [option for group, option, _ in keys.own_files() if group == "model"]
    files = tuple(f"{file}, line " for option in own for file, _ in keys.library.files("model", option))
    places = {key: place for key, (place, _) in keys.places.items()}
    is_own = places.get("model.path", "").startswith(files)
    return {key: place for key, place in places.items() if is_own or not place.startswith(files)}


def _set(node: DictConfig, item: Override) -> None:
    key, value, is_added = item.key_or_group, item.value(), item.is_add() or item.is_force_add()
    parents = accumulate(key.split(".")[:-1], "{}.{}".format)
    if whole := next((name for name in parents if OmegaConf.is_list(OmegaConf.select(node, name))), ""):
        raise ConfigError(f"unknown key {key!r}; {whole} has no keys of its own")
    before = OmegaConf.select(node, key, throw_on_missing=False, throw_on_resolution_failure=False)
    if item.is_add() and before is not None and not isinstance(value, dict | list):  # the same error as Hydra
        raise ConfigError(f"{item.input_line}: An item is already at {key!r}; set it with {key}=<value>")
    for name, one in _given(key, value):
        if one == "???":  # in a mapping OmegaConf keeps the value before
            raise ConfigError(_missing(name))
        if one == "" and _may_be_null(node, name):
            raise ConfigError(f"{name} has no value; give one, or null for none")
    _lay(node, key, value, is_added=is_added)
    for name, one in _given(key, value):
        _refuse_number(node, name, str(one))


def _may_be_null(node: DictConfig, key: str) -> bool:
    """Whether the type of a key says that it may be null; False for a key without a type, and for a name."""
    above, _, name = key.rpartition(".")
    parent = OmegaConf.select(node, above) if above else node
    leaf: Any = parent._get_node(name, validate_access=False) if isinstance(parent, DictConfig) else None
    return name != "name" and leaf is not None and not isinstance(leaf, AnyNode) and leaf._is_optional()


def _given(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for a value, or for each one in a mapping."""
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from _given(f"{key}.{name}", inner)


def _refuse_number(node: DictConfig, key: str, given: str, place: str = "") -> None:
    """Raises ConfigError for a number other than 0 and 1 in place of true or false: OmegaConf takes it as true."""
    if given.lstrip("-").isdigit() and given not in ("0", "1") and OmegaConf.select(node, key) is True:
        raise ConfigError(f"{place}{key} is {given!r}; it must be true or false")


def _resolved(node: DictConfig, overrides: Sequence[str], keys: Keys) -> dict[str, Any]:
    """Returns the node, resolved, as plain containers. overrides, keys: that it was made of, for errors."""
    with in_one_line(overrides, keys):
        raw = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


_NO_WORD = frozenset(".[]")  # what a word of a dotted key cannot have


def _lay(node: DictConfig, key: str, value: Any, *, is_added: bool = False) -> None:
    """Sets a key. A mapping is laid on another key by key, so that an error has the key and a class replaces what was
    there; names that no dotted key can have, as of tenants or lengths, are merged."""
    is_onto = OmegaConf.is_dict(OmegaConf.select(node, key, throw_on_resolution_failure=False))
    if isinstance(value, dict) and not _is_class(value) and is_onto:
        for name, item in value.items():
            if isinstance(name, str) and _NO_WORD.isdisjoint(name):
                _lay(node, f"{key}.{name}", item, is_added=is_added)
            else:
                OmegaConf.update(node, key, {name: item}, force_add=is_added)
    else:
        OmegaConf.update(node, key, value, merge=not _is_class(value), force_add=is_added)


def _is_class(value: Any) -> bool:
    """Whether a value names a class; such a value replaces a preset's class and its parameters instead of merging."""
    return isinstance(value, dict) and "_target_" in value


def compose_from(saved: dict[str, Any], overrides: list[str]) -> RunConfig:
    """Returns a run's saved configuration with overrides applied, both checked against the groups' schemas.

    An override that chooses a group's option (scheduler=…) replaces that group. A model without files is simulated in
    the dtype that the run's engine computed in, unless one is chosen. Raises ConfigError with a one-line message.
    """
    given = {item.key_or_group for item in map(parsed, overrides) if item.key_or_group in GROUPS} - {
        parsed(item).key_or_group for item in overrides if is_value(item)
    }
    kept = {key: value for key, value in saved.items() if key not in given}
    if "device" in kept:  # fields of DeviceSpec that the run is too old to have get their defaults
        none = {item.name: item.default for item in fields(DeviceSpec) if item.default is not MISSING}
        kept["device"] = none | kept["device"]
    own = {key: value for key, value in kept.items() if _is_class(value)}
    chosen = {group: _option(group, saved) for group in GROUPS}
    keys = check(overrides, chosen=chosen | dict.fromkeys(own))
    node = _chosen(overrides, keys, [f"{group}={chosen[group]}" for group in GROUPS if group not in given])
    with in_one_line((), keys):
        for key, value in kept.items():
            if key in own:  # a user's own class has no schema
                with open_dict(node):
                    node[key] = OmegaConf.create(value)
            else:
                _lay(node, key, value)
    config = RunConfig.from_container(_resolved(_laid(node, overrides, keys), overrides, keys))
    is_chosen = any(parsed(item).key_or_group in ("model", "model.dtype") for item in overrides)
    if config.model.path is None and not is_chosen and unlike_the_engine(saved, config):
        config = config.with_values({"model.dtype": engine_dtype(saved)})
    return config


def _option(group: str, saved: dict[str, Any]) -> str:
    """Returns the option whose schema fits a group's saved values."""
    names = options(group)
    name = saved.get(group, {}).get("name")
    if name in names:
        return str(name)
    return "_schema" if group in ("scheduler", "model", "device") else names[0]


def to_overrides(settings: dict[str, Any]) -> list[str]:
    """Turns Python settings into overrides: a string chooses a group's option, a dict sets keys (`name` is the option).

    {"scheduler": "decode_first", "cache": {"block_size": 32}, "seed": 1} becomes
    ["scheduler=decode_first", "cache.block_size=32", "seed=1"]; config_dir is --config-dir.
    """
    settings = dict(settings)
    own = settings.pop("config_dir", None)
    chosen = [] if own is None else with_searched([f"--config-dir={own}"])
    values: list[str] = []
    tops = (*GROUPS, "experiment", *PLAIN)
    for key, value in settings.items():
        if key not in tops:
            group, _, name = key.partition(".")
            instead = f" (give {group}={{{name!r}: …}})" if group in GROUPS else ""
            raise ConfigError(unknown(f"there is no group {key!r}{instead}", key, tops))
        if isinstance(value, dict):
            value = dict(value)
            if "name" in value:
                chosen.append(f"{key}={value.pop('name')}")
            values += [f"{key}.{name}={literal(item, f'{key}.{name}')}" for name, item in value.items()]
        else:
            chosen.append(f"{key}={literal(value, key)}")
    refuse_repeated(values)
    return chosen + values
