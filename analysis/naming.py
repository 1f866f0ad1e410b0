"""Names for configurations: the fewest settings that distinguish them from each other, and settings as words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.format import component, plain

NAMING_KEYS = ("name", "preset", "composition", "policy", "_target_")
_UNITS = {  # the end of a key -> (what it says, units by size)
    "_bytes_per_s": (" bandwidth", {1e9: "GB/s", 1e6: "MB/s", 1e3: "kB/s", 1.0: "B/s"}),
    "_gib": ("", {1.0: "GiB"}),
    "_ns": ("", {1e9: "s", 1e6: "ms", 1e3: "µs", 1.0: "ns"}),
}
DECIDES = "backend.decides"  # of runs in vLLM: which scheduler decided, this testbed's or vLLM's own
VERSION = "version.name"  # no setting: the folder of runs that others differ from in their classes or code only
SPEED = "backend.speed"  # of a replay: how fast its arrivals come, so a part of the load


def is_seed(key: str) -> bool:
    return key.split(".")[-1] == "seed"


def is_of_trace(key: str) -> bool:
    """Whether a setting decides which requests come when."""
    return key.startswith("trace.") or key == SPEED


def is_of_router(key: str) -> bool:
    return f"{key}.".startswith("backend.router.")


def naming_keys(configs: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> list[str]:
    """Keys of `swept` that name the configurations: each one distinguishes some that the keys before it did not.
    Component names come first, then `DECIDES`; seeds come after all keys that may change decisions."""
    kept: list[str] = []
    groups = 1
    for key in sorted(swept, key=naming_rank):
        split = len({repr([config.get(k) for k in (*kept, key)]) for config in configs})
        if split > groups:
            kept, groups = [*kept, key], split
    return kept


def naming_rank(key: str) -> tuple[bool, bool, int]:
    leaf = key.split(".")[-1]
    place = 0 if leaf == "name" else 1 if key == DECIDES else 2 if leaf in NAMING_KEYS else 3
    return key.split(".")[0] in ("slo", "report", "record"), is_seed(key), place


def labels_of(configs: Sequence[tuple[Mapping[str, Any], Path]], swept: Sequence[str]) -> list[str]:
    """A label for each (configuration, folder), made of the fewest swept keys that distinguish them; without such keys
    it is the folder's name. Labels that are still equal get the folder's path added."""
    keys = naming_keys([config for config, _ in configs], swept)
    labels = [level_names({key: config.get(key) for key in keys}) or path.name for config, path in configs]
    shared = {label for label, count in Counter(labels).items() if count > 1}
    return [f"{label} ({path})" if label in shared else label for label, (_, path) in zip(labels, configs, strict=True)]


def levels_of(values: Iterable[Any]) -> list[Any]:
    """The distinct values of a setting: numbers in ascending order, then other values in order of first occurrence."""
    levels = list(dict.fromkeys(as_cell(value) for value in values))
    numeric = [level for level in levels if isinstance(level, int | float)]
    return sorted(numeric) + [level for level in levels if not isinstance(level, int | float)]


def level_names(levels: Mapping[str, Any]) -> str:
    """The levels of these keys in words, such as "sarathi, watermark 0.01"; "" if there are no keys. A comma with a
    space is only between levels, as `apart` goes by it."""
    return ", ".join(_level_name(key, value, list(levels)).replace(", ", ",") for key, value in levels.items())


def apart(name: str, base: str) -> tuple[str, str, str]:
    """Two arms' names without the levels that both have, and these: "sjf", "fcfs", "watermark 0"."""
    mine, theirs = name.split(", "), base.split(", ")
    both = [one for one, other in zip(mine, theirs, strict=False) if one == other]
    if name == base or len(mine) != len(theirs):
        return name, base, ""
    pairs = [(one, other) for one, other in zip(mine, theirs, strict=True) if one != other]
    return ", ".join(one for one, _ in pairs), ", ".join(other for _, other in pairs), ", ".join(both)


def _level_name(key: str, value: Any, naming: Sequence[str]) -> str:
    leaf = key.split(".")[-1]
    if key == DECIDES:
        return "vLLM's own scheduler" if value == "vllm" else "the testbed's scheduler"
    if key == "sampling.name":
        return f"{plain(value)} sampling"
    if leaf in NAMING_KEYS:
        return plain(value).rsplit(".", 1)[-1] if leaf == "_target_" else plain(value)
    same_leaf = sum(other.split(".")[-1] == leaf for other in naming) > 1
    return f"{key if same_leaf else factor_name(key)} {level_text(key, value)}"


def factor_name(key: str) -> str:
    """A factor's key as words: "cache.prefix_caching" -> "prefix caching", "scheduler.name" -> "scheduler". A unit is
    left to `level_text`."""
    parts = key.split(".")
    word = parts[-2] if parts[-1] in NAMING_KEYS and len(parts) > 1 else parts[-1]
    for end, (said, _) in _UNITS.items():
        word = f"{word.removesuffix(end)}{said}" if word.endswith(end) else word
    return word.replace("_", " ")


def level_text(key: str, value: Any) -> str:
    """A setting's value as text, with the unit that its key ends in: "55 GB/s"."""
    units = next((units for end, (_, units) in _UNITS.items() if key.endswith(end)), None)
    if units is None or isinstance(value, bool) or not isinstance(value, int | float):
        return plain(value)
    size = next((size for size in units if abs(value) >= size), min(units))
    return f"{value / size:.15g} {units[size]}"


def as_cell(value: Any) -> Any:
    """A configuration value as the cell of a frame: lists and mappings become JSON text."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def align(configs: Sequence[dict[str, Any]]) -> None:
    """Gives a component the same key in every flat configuration if some have only its name ("watermark") and others
    have nested keys for a class or its arguments: the nested keys become one text such as "AtMost(n=16)", with the
    module and all digits if that is the text of different components. Where a group is an option with a name in some
    and a user's class in others, the class is the name, as "mine.Cost"."""
    keys = {key for config in configs for key in config}
    for name in (key for key in keys if key.endswith(".name")):
        target = f"{name.removesuffix('name')}_target_"
        for config in (config for config in configs if name not in config and target in config):
            config[name] = config[target]
    parents = {key[:place] for key in keys for place, letter in enumerate(key) if letter == "."}
    for mixed in keys & parents:
        nested = [_below(config, f"{mixed}.") for config in configs]
        num_of = Counter({repr(sorted(inner.items())): component(inner) for inner in nested}.values())  # by text
        for config, inner in zip(configs, nested, strict=True):
            if words := component(inner):
                for key in inner:
                    del config[f"{mixed}.{key}"]
                config[mixed] = component(inner, is_exact=True) if num_of[words] > 1 else words


def _below(config: Mapping[str, Any], start: str) -> dict[str, Any]:
    """The part of a flat configuration whose keys begin so, without that beginning."""
    return {key.removeprefix(start): value for key, value in config.items() if key.startswith(start)}
