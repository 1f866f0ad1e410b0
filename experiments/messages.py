"""Hydra's and OmegaConf's complaints as one line with the nearest valid name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.errors import OverrideParseException

from experiments.config import GROUPS
from experiments.settings import GONE
from testbed.errors import ConfigError
from testbed.foreign_text import parsed, unknown


def translate(error: Exception, overrides: list[str]) -> ConfigError:
    """A ConfigError that says what Hydra's exception means."""
    text = str(error)
    cause = f"{text}\n{error.__cause__ or ''}"
    if match := re.match(r"In '([^']+)': \w+ raised while composing config", text):
        return _in_file(match[1], text, overrides)
    if match := re.search(r"Could not override '([^']+)'", text):
        return unknown_key(match[1], overrides)
    if match := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        return ConfigError(
            unknown(
                f"{match[1]} has no option {match[2]!r}",
                match[2],
                [*options(match[1]), *_own_options(overrides, match[1])],
            )
        )
    if match := re.search(r"Error merging override ([^\n]+)", text):
        detail = cause.partition(match[0])[2]
        if re.search(r"is not a ListConfig|Cannot merge \w+ with ListConfig", detail):
            return not_a_list(match[1])
        return wrong_type(match[1], detail) or ConfigError(f"{match[1]}: {_detail(detail)}")
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return ConfigError(f"{match[1]} has several values: add -m to run each of them, or write a list as key=[a,b]")
    if isinstance(error, OverrideParseException):
        return ConfigError(f"cannot read the override {error.override!r}: expected key=value (quote it for the shell)")
    if match := re.search(r"Key '([^']+)' (?:is not in struct|not in '\w+')\s+full_key: (\S+)", cause):
        return unknown_key(match[2], overrides)
    if isinstance(error, ValueError) and is_hydras(error):
        return ConfigError(f"{_not_a_name(overrides)}: expected key=value, and the name of an option for a group")
    if isinstance(error, yaml.YAMLError):
        return ConfigError(f"a configuration file is not YAML: {' '.join(text.split())}")
    return ConfigError(_detail(text) if text.strip() else type(error).__name__)


_LISTS = {  # examples of keys that have a list
    "trace.transforms": "[{name: thin, fraction: 0.5}]",
    "trace.tenants": "[{name: chat, share: 2}, {name: batch}]",
}


def not_a_list(override: str) -> ConfigError:
    """For key=value where the key has a list."""
    key, _, value = override.partition("=")
    key = key.lstrip("+")
    example = _LISTS.get(key, "[a, b]")
    return ConfigError(f"{key} is {value!r}; it must be a list, as in '{key}={example}' (quoted for the shell)")


_TYPES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}  # as OmegaConf calls them


def wrong_type(override: str, detail: str) -> ConfigError | None:
    """For key=value where OmegaConf says, in `detail`, that the key has values of another type; None if it does not."""
    key, _, value = override.lstrip("+").partition("=")
    if match := re.search(r"Value '.*' (?:of type '\w+' could not be converted to|is not a valid) (\w+)", detail):
        return ConfigError(f"{key} is {value!r}; it must be {_TYPES.get(match[1], f'of type {match[1]}')}")
    if "is not Optional" in detail:
        return ConfigError(f"{key} is null; it must have a value")
    if "is not a subclass of" in detail:
        return ConfigError(f"{key} is {value!r}; it is a group of keys: set one as {key}.<key>=<value>")
    return None


def _in_file(option: str, text: str, overrides: list[str]) -> ConfigError:
    """What is wrong in the file of an option, such as device/mine: where it stands, and what was expected."""
    folder = _own_folder(overrides)
    file = None if folder is None else folder / f"{option}.yaml"
    place = f"in {option}" if file is None or not file.is_file() else str(file)
    key = re.search(r"full_key: (\S+)", text)
    if key is None:
        return ConfigError(f"{place}: {_detail(text.partition(chr(10))[2] or text)}")
    name = key[1].rpartition(".")[2]
    if file is not None and file.is_file():
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        numbers = [
            number for number, line in enumerate(lines, 1) if re.match(rf"\s*['\"]?{re.escape(name)}['\"]?\s*:", line)
        ]
        place += f", line {numbers[-1]}" if numbers else ""
    value = re.search(r"Value '(.*)' (?:of type|is not)", text)
    if (wrong := wrong_type(f"{key[1]}={value[1] if value else ''}", text)) is not None:
        return ConfigError(f"{place}: {wrong}")
    if re.search(r"Key '[^']+' (is )?not in", text):
        return ConfigError(f"{place}: {unknown_key(key[1], [])}")
    return ConfigError(f"{place}: {key[1]}: {_detail(text.partition(chr(10))[2])}")


def _own_folder(arguments: list[str]) -> Path | None:
    """The folder that --config-dir names."""
    for flag in ("--config-dir", "-cd"):
        if flag in arguments[:-1]:
            return Path(arguments[arguments.index(flag) + 1])
    return None


def read_own_options(arguments: list[str]) -> None:
    """Reads the options of that folder that were chosen, before Hydra does, which cannot say what is wrong with a text.

    Raises ConfigError naming the file, or what YAML has to say.
    """
    folder = _own_folder(arguments)
    for item in arguments if folder is not None else ():
        group, _, option = item.partition("=")
        file = Path(folder or "", group, f"{option}.yaml")
        if file.is_file():
            try:
                parsed(yaml.compose, file.read_bytes())
            except ValueError as error:
                raise ConfigError(f"{file}: {error}; expected YAML") from None


def _own_options(arguments: list[str], group: str) -> list[str]:
    """Options of a group in that folder."""
    folder = _own_folder(arguments)
    files = [] if folder is None else (folder / group).glob("*.yaml")
    return sorted(file.stem for file in files if not file.stem.startswith("_"))


def _not_a_name(overrides: list[str]) -> str:
    """The override that gives a group something else than a name."""
    for item in overrides:
        key, _, value = item.partition("=")
        if not key or (key in GROUPS and not re.match(r"[A-Za-z_{]", value)):
            return f"cannot read the override {item!r}"
    return "cannot read an override"


def is_hydras(error: ValueError) -> bool:
    """Whether Hydra raised it, over an override such as `=3` or `model=3`."""
    return str(error).startswith("Config group override")


def _detail(text: str) -> str:
    """The line that says what is wrong, without Hydra's framing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [
        line for line in lines if re.match(r"(Value|Invalid|Cannot|Key|Unsupported|mismatched|no viable|token)", line)
    ]
    return telling[0] if telling else lines[0]


def too_large(overrides: list[str]) -> ConfigError:
    """The error for a whole number that no float holds, given where a number is wanted."""
    longest = max(overrides, key=lambda item: len(re.sub(r"\D", "", item)), default="")
    shown = longest if len(longest) <= 80 else longest[:77] + "..."
    return ConfigError(f"{shown}: it must be a number that a float holds")


def unknown_key(key: str, overrides: list[str]) -> ConfigError:
    from difflib import get_close_matches

    if key in GONE:
        return ConfigError(f"{key} {GONE[key]}; leave it out")
    if owners := _owners(key):
        group = key.partition(".")[0]
        of = f"{key} is a key of {group}={' or '.join(owners)}"
        of += " only: replicas are simulated" if key in _OF_FLEETS else ""
        return ConfigError(f"{of}; leave it out, or choose {group}={owners[0]}")
    keys = valid_keys(overrides)
    near = get_close_matches(key, keys, n=1, cutoff=0.5)
    group, _, name = key.rpartition(".")
    if group in _GIVEN_WHOLE:
        return ConfigError(f"unknown key {key!r}; {group} is given whole, as in '{group}={{{name}: …}}'")
    siblings = [name for name in keys if name.rpartition(".")[0] == group]
    hint = f"did you mean {near[0]!r}? " if near else ""
    if group and siblings:
        where = f"{group} has: {', '.join(name.rpartition('.')[2] for name in siblings)}"
    else:
        where = f"at the top there are: {', '.join(dict.fromkeys(name.partition('.')[0] for name in keys))}"
    return ConfigError(f"unknown key {key!r}; {hint}{where}")


_GIVEN_WHOLE = ("trace.turn_prompt",)  # groups that may be absent
_OF_FLEETS = ("backend.num_replicas", "backend.router", "backend.replicas_per_link")


def _owners(key: str) -> list[str]:
    """The options of a key's group that have it; none where it is one for all of the group's options."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from analysis.load import flatten

    group, _, name = key.partition(".")
    options: Any = ConfigStore.instance().repo.get(group, {})
    nodes = {file.removesuffix(".yaml"): options[file].node for file in options if file.endswith(".yaml")}
    return [option for option, node in nodes.items() if name in flatten(cast(Any, OmegaConf.to_container(node)))]


def valid_keys(overrides: list[str]) -> list[str]:
    """Dotted keys of the configuration with the groups that the overrides choose (sweeps take their first choice)."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from analysis.load import flatten

    choices = [item.split(",")[0] for item in overrides if re.match(r"^[a-z_]+=", item)]
    for chosen in (choices, []):
        GlobalHydra.instance().clear()
        try:
            with initialize_config_module("experiments.conf", version_base="1.3"):
                config = compose("config", overrides=[item for item in chosen if not item.startswith("hydra")])
        except Exception:  # noqa: BLE001  a broken choice: the defaults' keys will do for a hint
            continue
        tree: Any = OmegaConf.to_container(config)
        return list(flatten(tree))
    return []


def options(group: str) -> list[str]:
    """Names of a group's options, the schemas left out."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path

    loader = ConfigLoaderImpl(create_config_search_path("pkg://experiments.conf"))
    return [name for name in loader.get_group_options(group) if not name.startswith("_")]
