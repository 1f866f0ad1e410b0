"""The available options and the keys of each: from Hydra's ConfigStore, the files of conf/, and a user's folders.

Knows names and types; does not know what values mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import hydra.conf
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from experiments.configuration.config import GROUPS, register
from testbed.errors import ConfigError
from testbed.foreign_text import not_yaml, parsed

CONF = Path(__file__).parents[1] / "conf"
_HYDRAS = Path(hydra.conf.__file__).parent  # Hydra's own options that are files
OVERLAYS = "experiment"  # the group whose options choose options of other groups and set their keys
Schema = type | Mapping[str, Any]  # a dataclass; for a file without one, the file's own keys


def options(group: str) -> list[str]:
    """Returns the names of a group's options, without schemas."""
    return Library().names(group)


@dataclass(frozen=True, slots=True)
class Library:
    """The shipped options and those in the user's own folders."""

    folders: tuple[Path, ...] = ()

    def names(self, group: str) -> list[str]:
        """Returns the names of a group's options, also for Hydra's groups (hydra/launcher). Empty: no such group."""
        files = [file.stem for folder in (CONF, _HYDRAS, *self.folders) for file in (folder / group).glob("*.yaml")]
        stored = [name.removesuffix(".yaml") for name in _stored(group) if name.endswith(".yaml")]
        return sorted({name for name in (*files, *stored) if not name.startswith("_")})

    def file(self, group: str, option: str) -> Path | None:
        """Returns the file of an option, or None. If there are several, Hydra also takes the first."""
        places = (folder / group / f"{option}.yaml" for folder in (CONF, *self.folders))
        return next((place for place in places if place.is_file()), None)

    def stamps(self) -> tuple[tuple[str, int, int], ...]:
        """Returns (file, modification time in ns, bytes) for each file in the user's own folders."""
        places = (*GROUPS, OVERLAYS, "hydra")  # not the whole folder, which may also contain runs
        files = sorted(file for folder in self.folders for place in places for file in (folder / place).rglob("*.yaml"))
        return tuple((str(file), stat.st_mtime_ns, stat.st_size) for file in files for stat in (file.stat(),))

    def schema(self, group: str, option: str) -> Schema | None:
        """Returns the keys of an option; None if it is a user's class, or if there is no such option."""
        stored, file = _stored(group), self.file(group, option)
        if file is not None and "_schema.yaml" in stored and file.is_relative_to(CONF):
            return _stored_schema(group, "_schema")
        if file is None:
            return _stored_schema(group, option)
        content = read_option(file)
        if "_target_" in content:
            return None
        for base in content.get("defaults", ()):
            if isinstance(base, str) and base not in ("_self_", option):
                return _stored_schema(group, base) or self.schema(group, base)
        return content

    def of_overlay(self, name: str) -> dict[str, str]:
        """Returns the options that an overlay chooses: {group: option}."""
        contents = self.contents(OVERLAYS, name)
        return {group: option for content in contents for group, option in chosen_by(content).items()}

    def contents(self, group: str, name: str) -> Iterator[dict[str, Any]]:
        """Yields the content of an option's file, preceded by that of each option of the same group in its defaults."""
        file = self.file(group, name)
        content = {} if file is None else read_option(file)
        for entry in content.get("defaults", ()):
            if isinstance(entry, str) and entry not in ("_self_", name):
                yield from self.contents(group, entry.removeprefix(f"/{group}/"))
        yield content


def is_group(key: str) -> bool:
    """Whether a key is a group, whose value is the name of an option."""
    return key in (*GROUPS, OVERLAYS) or key.startswith("hydra/")


def chosen_by(content: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options that the defaults list of a file chooses: {group: option}."""
    pairs = [pair for entry in content.get("defaults", ()) if isinstance(entry, dict) for pair in entry.items()]
    named = {str(key).rpartition(" ")[2].lstrip("/"): option for key, option in pairs}  # after `override`, `optional`
    return {group: option for group, option in named.items() if isinstance(option, str) and "@" not in group}


def _stored(group: str) -> dict[str, Any]:
    """Returns the nodes of a group in Hydra's ConfigStore, by name with .yaml."""
    register()
    if group.startswith("hydra/"):
        Plugins.instance()  # loading the plugins stores their options
    found: Any = ConfigStore.instance().repo
    for part in group.split("/"):
        found = found.get(part, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


def _stored_schema(group: str, option: str) -> Schema | None:
    stored, name = _stored(group), f"{option}.yaml"
    if name not in stored:
        return None
    node = stored[name].node  # made on first access
    kind = OmegaConf.get_type(node)
    if isinstance(kind, type) and is_dataclass(kind):
        return kind
    return None if "_target_" in node else dict(node)


def read_option(file: Path) -> dict[str, Any]:
    """Returns the content of an option's file. Raises ConfigError with the file and YAML's error."""
    loader = _FAST if file.is_relative_to(CONF) else yaml.SafeLoader  # slower, but with better errors for user files
    try:
        content = parsed(partial(yaml.load, Loader=loader), file.read_bytes())
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}{not_yaml(error)}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"{file}: expected keys, one a line, as block_size: 32")
    return content or {}


_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


# --- keys ---


def fields_of(schema: Schema) -> dict[str, Any]:
    """Returns the type of each key. Keys of a schema without types are Any."""
    if isinstance(schema, type):
        return _hints(schema)
    return {key: value if isinstance(value, Mapping) else Any for key, value in schema.items() if key != "defaults"}


_hints = cache(get_type_hints)  # get_type_hints itself evaluates the annotations on each call


def nested(kind: Any) -> Schema | None:
    """Returns the schema of a key that is itself a group of keys, else None."""
    if isinstance(kind, Mapping):
        return kind
    return next((item for item in (kind, *_options_of(kind)) if isinstance(item, type) and is_dataclass(item)), None)


def is_optional(kind: Any) -> bool:
    return kind is Any or type(None) in _options_of(kind)


def plain(kind: Any) -> Any:
    """Returns the type without `| None`."""
    left = [item for item in _options_of(kind) if item is not type(None)]
    return left[0] if len(left) == 1 else kind


def _options_of(kind: Any) -> Sequence[Any]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else ()


def dotted(schema: Schema | None, prefix: str) -> list[str]:
    """Returns the dotted keys of a group, including those of nested groups."""
    keys: list[str] = []
    for name, kind in () if schema is None else fields_of(schema).items():
        inner = nested(kind)
        keys += [f"{prefix}.{name}"] if inner is None else dotted(inner, f"{prefix}.{name}")
    return keys


def all_options(group: str) -> dict[str, Schema | None]:
    """Returns the schema of each option that has its own; empty if the group's options share one `_schema`."""
    names = [name.removesuffix(".yaml") for name in _stored(group) if name.endswith(".yaml")]
    return {name: Library().schema(group, name) for name in names if not name.startswith("_")}
