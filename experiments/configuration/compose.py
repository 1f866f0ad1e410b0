"""Composes configurations in Python: Hydra's groups and overrides without Hydra's command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import MISSING, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.configuration.config import GROUPS, RunConfig, register
from experiments.configuration.keys import PLAIN, too_large
from experiments.configuration.on_device import check_device
from experiments.configuration.options import options
from experiments.configuration.overrides import check, is_value, library_of, literal, parsed
from testbed import errors
from testbed.errors import ConfigError
from testbed.foreign_text import unknown
from testbed.specs.device import DeviceSpec


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
    check(overrides)
    with in_one_line(overrides):
        return _laid_over(_chosen([item for item in overrides if not is_value(item)]), overrides)


def with_swept(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides, preceded by the sweep of the `experiment` that they name, without keys that they set."""
    named = [item for item in overrides if item.startswith("experiment=")]
    if not named or parsed(named[-1]).is_sweep_override():
        return list(overrides)
    given = {item.partition("=")[0] for item in overrides}
    searched = [item for item in overrides if item.startswith("hydra.searchpath=")]
    overlay = [*searched, named[-1]]
    check(overlay)
    with in_one_line(overlay), hydra_app():
        node = compose("config", overrides=overlay, return_hydra_config=True)
        swept = {str(key): str(values) for key, values in (node.hydra.sweeper.get("params") or {}).items()}
    return [*(f"{key}={values}" for key, values in swept.items() if key not in given), *overrides]


@contextmanager
def in_one_line(overrides: Sequence[str]) -> Iterator[None]:
    """Context in which errors of Hydra and OmegaConf are raised as a ConfigError with a one-line message."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        cause = "" if error.__cause__ is None else f": {_line(error.__cause__)}"
        raise ConfigError(_line(error) + cause) from None
    except OverflowError:
        raise too_large(max(overrides, key=len, default="")) from None


def _line(error: BaseException) -> str:
    """Returns an error as one line that begins with the key. OmegaConf gives the key in separate lines at the end."""
    text, comes_after, _ = str(error).partition("\n    full_key: ")
    kind, is_resolvers, said = text.partition(" raised while resolving interpolation: ")
    if is_resolvers and hasattr(errors, kind):
        text = said  # our own errors name the key already
    elif comes_after:
        text = f"{getattr(error, 'full_key', '')}: {text}"
    if text.rstrip().endswith("Recursive interpolation detected"):
        text += ": it asks for itself, maybe by way of others; give one of them a value"
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def hydra_app() -> Iterator[Any]:
    """Context in which `compose` reads our configuration; yields Hydra's app, which has `run` and `multirun`, and
    restores the caller's Hydra state afterwards."""
    register()
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("experiments.conf", version_base="1.3"):
            yield GlobalHydra.instance().hydra
    finally:
        if before is not None:
            GlobalHydra.instance().clear()
            GlobalHydra.instance().initialize(before)


def _chosen(choices: list[str]) -> DictConfig:
    """Returns the configuration of these choices of options, as a copy on which values can be set."""
    return deepcopy(_composed(tuple(choices), library_of(choices).stamps()))


@lru_cache(maxsize=64)
def _composed(choices: tuple[str, ...], stamps: tuple[Any, ...]) -> DictConfig:
    """Composes and caches. stamps: part of the cache key, as a user's own files may be edited between two calls. An
    option that is stored again under its name in Hydra's ConfigStore is not noticed."""
    with hydra_app():
        return compose("config", overrides=list(choices))


def _laid_over(node: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Sets the overrides' values on the node and returns it, resolved, as plain containers."""
    for override in [parsed(item) for item in overrides if is_value(item)]:
        key, value, is_added = override.key_or_group, override.value(), override.is_add() or override.is_force_add()
        is_there = OmegaConf.select(node, key, throw_on_missing=False) is not None
        if override.is_add() and is_there and not isinstance(value, dict | list):  # the same error as Hydra
            raise ConfigError(f"{override.input_line}: An item is already at {key!r}; set it with {key}=<value>")
        _lay(node, key, value, is_added=is_added)
    raw = OmegaConf.to_container(node, resolve=True)
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def _lay(node: DictConfig, key: str, value: Any, *, is_added: bool = False) -> None:
    """Sets a key. A mapping that contains classes is set key by key, because a class replaces the old value."""
    if isinstance(value, dict) and not _is_class(value) and any(map(_is_class, value.values())):
        for name, item in value.items():
            _lay(node, f"{key}.{name}", item, is_added=is_added)
    else:
        OmegaConf.update(node, key, value, merge=not _is_class(value), force_add=is_added)


def _is_class(value: Any) -> bool:
    """Whether a value names a class; such a value replaces a preset's class and its parameters instead of merging."""
    return isinstance(value, dict) and "_target_" in value


def compose_from(saved: dict[str, Any], overrides: list[str]) -> RunConfig:
    """Returns a run's saved configuration with overrides applied, both checked against the groups' schemas.

    An override that chooses a group's option (scheduler=…) replaces that group. Raises ConfigError with a one-line
    message.
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
    check(overrides, chosen=chosen | dict.fromkeys(own), laid_on={key: kept[key] for key in kept if key not in own})
    with in_one_line(overrides):
        choices = [item for item in overrides if not is_value(item)]
        node = _chosen([*(f"{group}={chosen[group]}" for group in GROUPS if group not in given), *choices])
        for key, value in kept.items():
            if key in own:  # a user's own class has no schema
                with open_dict(node):
                    node[key] = OmegaConf.create(value)
            else:
                _lay(node, key, value)
        return RunConfig.from_container(_laid_over(node, overrides))


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
    ["scheduler=decode_first", "cache.block_size=32", "seed=1"].
    """
    chosen: list[str] = []
    values: list[str] = []
    tops = (*GROUPS, "experiment", *PLAIN)
    for key, value in settings.items():
        if key not in tops:
            raise ConfigError(unknown(f"there is no group {key!r}", key, tops))
        if isinstance(value, dict):
            value = dict(value)
            if "name" in value:
                chosen.append(f"{key}={value.pop('name')}")
            values += [f"{key}.{name}={literal(item, f'{key}.{name}')}" for name, item in value.items()]
        else:
            chosen.append(f"{key}={literal(value, key)}")
    return chosen + values
