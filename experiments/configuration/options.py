"""The available options and the keys of each: from Hydra's ConfigStore, the files of conf/, and a user's folders.

Knows names and types; does not know what values mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import hydra.conf
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from experiments.configuration.config import GROUPS, register, structured_options
from testbed.errors import ConfigError
from testbed.foreign_text import not_yaml, parsed, shown

CONF = Path(__file__).parents[1] / "conf"
_HYDRAS = Path(hydra.conf.__file__).parent  # Hydra's own options that are files
OVERLAYS = "experiment"  # the group whose options choose options of other groups and set their keys


def options(group: str) -> list[str]:
    """Returns the names of a group's options, without schemas."""
    return Library().names(group)


@dataclass(frozen=True, slots=True)
class Library:
    """The shipped options and those in the user's own folders."""

    folders: tuple[Path, ...] = ()

    def names(self, group: str) -> list[str]:
        """Returns the names of a group's options, also for Hydra's groups (hydra/launcher). Empty: no such group."""
        files = [file.stem for folder in (CONF, _HYDRAS, *self.folders) for file in (folder / group).glob("[!.]*.yaml")]
        stored = [name.removesuffix(".yaml") for name in _stored(group) if name.endswith(".yaml")]
        return sorted({name for name in (*files, *stored) if not name.startswith("_")})

    def file(self, group: str, option: str) -> Path | None:
        """Returns the file of an option, or None. If there are several, Hydra also takes the first."""
        places = (folder / group / f"{option}.yaml" for folder in (CONF, *self.folders))
        return next((place for place in places if place.is_file()), None)

    def has(self, group: str, option: str) -> bool:
        return self.file(group, option) is not None or f"{option}.yaml" in _stored(group)

    def stamps(self) -> tuple[tuple[str, int, int], ...]:
        """Returns (file, modification time in ns, bytes) for each file in the user's own folders."""
        places = (*GROUPS, OVERLAYS, "hydra")  # not the whole folder, which may also contain runs
        files = sorted(
            file for folder in self.folders for place in places for file in (folder / place).rglob("[!.]*.yaml")
        )
        return tuple((str(file), stat.st_mtime_ns, stat.st_size) for file in files for stat in (file.stat(),))

    def keys(self, group: str, option: str | None) -> list[str]:
        """Returns the dotted keys of an option: those of its schema; of a user's class or of a file without a schema
        those that the file has. Empty if there is no such option."""
        stored, file = _stored(group), self.file(group, option or "")
        if file is None or ("_schema.yaml" in stored and file.is_relative_to(CONF)):
            name = option if file is None else "_schema"
            return _stored_keys(group, f"{name}.yaml") if f"{name}.yaml" in stored else []
        contents = [content for _, content in self.files(group, file.stem)]
        bases = [] if "_target_" in contents[-1] else _bases(contents[-1])
        return self.keys(group, bases[0]) if bases else [key for one in contents for key in _dotted(one, group)]

    def owners(self, group: str, key: str) -> list[str]:
        """Returns the stored options of a group that have this dotted key."""
        names = [name.removesuffix(".yaml") for name in _stored(group) if not name.startswith("_")]
        return [name for name in names if key in self.keys(group, name)]

    def of_overlay(self, name: str) -> dict[str, str]:
        """Returns the options that an overlay chooses: {group: option}."""
        files = self.files(OVERLAYS, name)
        return {group: option for _, content in files for group, option in chosen_by(content).items()}

    def hidden(self, group: str, option: str) -> Path | None:
        """Returns the user's own file with the name of a shipped option, or None. (A launcher's name is free: it is
        Hydra's, not ours.)"""
        places = (folder / group / f"{option}.yaml" for folder in self.folders if is_shipped(group, option))
        return next((place for place in places if place.is_file()), None)

    def files(self, group: str, name: str, inside: tuple[str, ...] = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yields the file of an option and its content, preceded by those of the same group in its defaults. inside:
        the options that lead here. Raises ConfigError for one that leads back to itself."""
        file = self.file(group, name)
        if file is not None:
            if name in inside:
                raise ConfigError(
                    f"{file} begins with itself ({' → '.join([*inside, name])}); begin with another option"
                )
            content = read_option(file)
            for base in _bases(content):
                yield from self.files(group, base.removeprefix(f"/{group}/"), (*inside, name))
            yield file, content


def is_shipped(group: str, option: str) -> bool:
    """Whether an option is ours: others come from the user's folders, or from Hydra's ConfigStore."""
    return (CONF / group / f"{option}.yaml").is_file() or option in structured_options().get(group, {})


def _bases(content: Mapping[str, Any]) -> list[str]:
    """Returns the options of its own group that are in an option's defaults."""
    return [base for base in content.get("defaults", ()) if isinstance(base, str) and base != "_self_"]


def needed_by(content: Mapping[str, Any], group: str) -> list[tuple[str, str]]:
    """Returns (group, option) for each option that the defaults of a file of this group need."""
    pairs = [*((group, base.removeprefix(f"/{group}/")) for base in _bases(content)), *chosen_by(content).items()]
    return [pair for pair in pairs if is_group(pair[0]) and re.fullmatch(r"[\w.-]+", pair[1])]


def is_group(key: str) -> bool:
    """Whether a key is a group, whose value is the name of an option."""
    return key in (*GROUPS, OVERLAYS) or key.startswith("hydra/")


def pairs_in(content: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Returns the entries {group: option} of a file's defaults."""
    return [pair for entry in content.get("defaults", ()) if isinstance(entry, dict) for pair in entry.items()]


def chosen_by(content: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options that the defaults list of a file chooses: {group: option}."""
    pairs = pairs_in(content)
    named = {str(key).rpartition(" ")[2].lstrip("/"): option for key, option in pairs}  # after `override`, `optional`
    return {group: option for group, option in named.items() if isinstance(option, str) and "@" not in group}


def _stored(group: str) -> dict[str, Any]:
    """Returns the nodes of a group in Hydra's ConfigStore, by name with .yaml; of sweepers only ours."""
    register()
    if group.startswith("hydra/"):
        Plugins.instance()  # loading the plugins stores their options
    found: Any = ConfigStore.instance().repo
    for part in group.split("/"):
        found = found.get(part, {}) if isinstance(found, dict) else {}
    if group == "hydra/sweeper":
        return {"testbed.yaml": found["testbed.yaml"]}
    return found if isinstance(found, dict) else {}


@cache
def _stored_keys(group: str, name: str) -> list[str]:
    return [*_dotted(OmegaConf.to_container(_stored(group)[name].node), group.replace("/", "."))]


def _dotted(values: Any, prefix: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}.{name}")
        elif name != "defaults":
            yield f"{prefix}.{name}"


def read_option(file: Path) -> dict[str, Any]:
    """Returns the content of an option's file. Raises ConfigError with the file and YAML's error."""
    loader = _FAST if file.is_relative_to(CONF) else yaml.SafeLoader  # slower, but with better errors for user files
    try:
        content = parsed(partial(yaml.load, Loader=loader), file.read_bytes())
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}{not_yaml(error)}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"{file}: expected keys, one a line, as block_size: 32")
    if content and not _are_defaults(defaults := content.get("defaults", [])):
        raise ConfigError(f"{file}: defaults is {shown(defaults)}; it must be a list of options, as [h100, _self_]")
    return content or {}


def _are_defaults(value: object) -> bool:
    """Whether a file's defaults are a list of names and of {group: name}, as Hydra takes."""
    if not isinstance(value, list):
        return False
    pairs = [pair for entry in value if isinstance(entry, dict) for pair in [*entry.items()]]
    names = [entry for entry in value if not isinstance(entry, dict)]
    are_single = all(len(entry) == 1 for entry in value if isinstance(entry, dict))
    return are_single and all(isinstance(name, str) and name for name in (*names, *(key for key, _ in pairs)))


_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
