"""Configurations from Python: Hydra's groups and overrides without its command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from experiments.config import GROUPS, RunConfig, register
from experiments.messages import is_hydras, not_a_list, options, too_large, translate, unknown_key, wrong_type
from testbed.errors import ConfigError
from testbed.foreign_text import unknown

PLAIN = ("seed", "allow_ignored", "overwrite", "points_per_job")  # keys outside groups


def compose_config(overrides: list[str]) -> RunConfig:
    """The configuration that `testbed run <overrides>` would have. Raises ConfigError in one line."""
    return checked(overrides, RunConfig.from_container(compose_raw(overrides)))


def checked(overrides: Sequence[str], config: RunConfig) -> RunConfig:
    """The configuration that the overrides made, if it is not refused for what they ask for."""
    from experiments.on_device import check_device  # not at the top: it composes too

    check_device(overrides, config)
    return config


def compose_raw(overrides: list[str], *, with_hydra: bool = False) -> dict[str, Any]:
    """The same as plain containers. with_hydra: Hydra's own settings too, as `hydra`: of these modes, callbacks, job,
    the run's folder, and what an overlay sweeps. Raises ConfigError in one line."""
    of_hydra = {}
    with in_one_line(overrides):
        node = _hydras(overrides, with_hydra=True) if with_hydra else _composed(overrides)
        if with_hydra:
            of_hydra = {key: OmegaConf.to_container(node.hydra[key], resolve=True) for key in ("run", "callbacks")}
            job = node.hydra.job
            of_hydra |= {"mode": node.hydra.mode, "job": {"env_set": dict(job.env_set), "chdir": job.chdir}}
            of_hydra["swept"] = dict(node.hydra.sweeper.get("params") or {})  # an overlay's
            with open_dict(node):
                del node["hydra"]
        raw = OmegaConf.to_container(node, resolve=True)
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()} | ({"hydra": of_hydra} if with_hydra else {})


@contextmanager
def in_one_line(overrides: list[str]) -> Iterator[None]:
    """Within, what Hydra and OmegaConf complain of is raised as a ConfigError about these overrides."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise translate(error, overrides) from None
    except ValueError as error:
        if not is_hydras(error):
            raise
        raise translate(error, overrides) from None
    except OverflowError:
        raise too_large(overrides) from None


def _hydras(overrides: list[str], *, with_hydra: bool = False) -> DictConfig:
    """What Hydra composes, all of it anew."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_module("experiments.conf", version_base="1.3"):
        return compose("config", overrides=overrides, return_hydra_config=with_hydra)


def _composed(overrides: list[str]) -> DictConfig:
    """The same, in a twentieth of the time where the options have been chosen together before in this process, as the
    points of a sweep do: their files are read once, and the values are laid over a copy, by Hydra's own function."""
    global _registered
    if _store() != _registered:  # an option of the user's was stored again
        _of_choices.cache_clear()
    values = [item for item in overrides if _is_value(item)]
    parsed = OverridesParser.create().parse_overrides(values)
    ConfigLoaderImpl.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=False)
    node = deepcopy(_of_choices(tuple([item for item in overrides if not _is_value(item)])))
    _registered = _store()  # with the schemas that were made when they were asked for
    ConfigLoaderImpl._apply_overrides_to_config(parsed, node)
    return node


def subfolder(overrides: list[str], number: int) -> str:
    """What `hydra.sweep.subdir` says of this point of a sweep."""
    with in_one_line(overrides):
        node = _hydras([*overrides, f"hydra.job.num={number}"], with_hydra=True)
        HydraConfig.instance().set_config(node)
        return str(node.hydra.sweep.subdir)


@lru_cache(maxsize=64)
def _of_choices(choices: tuple[str, ...]) -> DictConfig:
    return _hydras(list(choices))


def _is_value(override: str) -> bool:
    """Whether it sets a key, and chooses no option of a group."""
    key, _, value = override.partition("=")
    name = key.lstrip("+~")
    if name.startswith("hydra") or "/" in name or "@" in name:
        return False
    return "." in name or name in PLAIN or value.startswith("{")


def _store() -> list[ConfigNode]:
    """Every option that is registered with Hydra."""
    nodes: list[ConfigNode] = []
    groups = [ConfigStore.instance().repo]
    for group in groups:
        for value in group.values():
            if isinstance(value, dict):
                groups.append(value)
            elif value is not None:
                nodes.append(value)
    return nodes


_registered: list[ConfigNode] = []


def compose_from(saved: dict[str, Any], overrides: list[str]) -> RunConfig:
    """A run's saved configuration with overrides over it, both checked against the groups' schemas.

    An override that chooses a group's option (scheduler=…) replaces that group. Raises ConfigError in one line.
    """
    register()
    chosen = dict(item.split("=", 1) for item in overrides if item.partition("=")[0] in GROUPS)
    with in_one_line(overrides):
        node = _composed([f"{group}={_option(group, saved, chosen)}" for group in GROUPS])
        OmegaConf.set_struct(node, True)
        for key, value in saved.items():
            if key in chosen:
                continue
            if isinstance(value, dict) and "_target_" in value:
                OmegaConf.set_struct(node, False)
                node[key] = OmegaConf.create(value)  # a user's own class: it has no schema
                OmegaConf.set_struct(node, True)
            else:
                OmegaConf.update(node, key, value)
        for item in overrides:
            if item.partition("=")[0] not in chosen:
                _lay_over(node, item, overrides)
        raw = OmegaConf.to_container(node, resolve=True)
    assert isinstance(raw, dict)
    return RunConfig.from_container({str(key): value for key, value in raw.items()})


def _lay_over(node: DictConfig, override: str, overrides: list[str]) -> None:
    """Sets one key=value. Raises ConfigError naming it."""
    key, _, value = override.partition("=")
    try:
        OmegaConf.update(node, key, yaml.safe_load(value))
    except (ConfigKeyError, ConfigAttributeError):
        raise unknown_key(key, overrides) from None
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        if "ListConfig" in str(error):
            raise not_a_list(override) from None
        said = wrong_type(override, str(error)) or ConfigError(f"{override}: {str(error).splitlines()[0]}")
        raise said from None
    except OverflowError:
        raise too_large([override]) from None


def _option(group: str, saved: dict[str, Any], chosen: dict[str, str]) -> str:
    """The option whose schema the group's saved values have."""
    if group in chosen:
        return chosen[group]
    names = options(group)
    name = saved.get(group, {}).get("name")
    if name in names:
        return str(name)
    return "_schema" if group in ("scheduler", "model", "device") else names[0]


def to_overrides(settings: dict[str, Any]) -> list[str]:
    """Python settings as overrides: a string chooses a group's option, a dict sets keys (`name` chooses the option).

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
            values += _flat(key, value)
        else:
            chosen.append(f"{key}={literal(value)}")
    return chosen + values


def _flat(prefix: str, tree: dict[str, Any]) -> list[str]:
    items: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict) and "_target_" not in value:
            items += _flat(f"{prefix}.{key}", value)
        else:
            items.append(f"{prefix}.{key}={literal(value)}")
    return items


def literal(value: Any) -> str:
    """A Python value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(literal(item) for item in value) + "]"
    if isinstance(value, str) and not value.replace("_", "").replace(".", "").isalnum():
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value)
