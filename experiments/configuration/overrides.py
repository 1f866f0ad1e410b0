"""Checks the text of overrides (`key=value`) and the options that they choose. Keys and values are checked by
OmegaConf, where `compose` sets them. Every mistake is reported in one line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from itertools import chain, islice, product
from math import prod
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, Override, RangeSweep, Transformer
from hydra.errors import HydraException
from omegaconf import OmegaConf

from experiments.configuration.config import GROUPS, whole_class
from experiments.configuration.grammar import keys_in, literal, parsed
from experiments.configuration.keys import PLAIN, Keys
from experiments.configuration.options import CONF, OVERLAYS, Library, chosen_by, is_group, read_option
from experiments.configuration.policies import POLICIES
from testbed.errors import ConfigError
from testbed.foreign_text import nearest, shown, unknown

MAX_POINTS = 100_000
_EXTRAS = {  # launchers of other packages, and what to install for each
    "joblib": "'.[joblib]' in the repository",
    **dict.fromkeys(("ray", "ray_aws"), "'.[ray]' in the repository"),
    **dict.fromkeys(("submitit_local", "submitit_slurm"), "'.[slurm]' in the repository"),
}


def check(overrides: Sequence[str], *, chosen: Mapping[str, str | None] | None = None, is_sweep: bool = False) -> Keys:
    """Returns the keys of the options that the overrides choose. Raises ConfigError with a one-line message for what
    is wrong with an override before a value is set: its text, its option, its place.

    chosen: the option of each group that no override chooses (None: a user's class, whose keys are not known here); by
    default those of config.yaml. is_sweep: whether a key may have several values.
    """
    items = [parsed(text) for text in overrides]
    for item in items:
        if item.is_sweep_override() and not is_sweep:
            raise ConfigError(
                f"{item.input_line} has several values: add -m to run each of them, or put them in brackets if the "
                "key's value is a list"
            )
    keys = _keys(items, library_of(overrides), chosen or {})
    keys.refuse_hidden()
    keys.check_packages()
    keys.refuse_bases()
    for item in items:
        _check(item, keys)
    return keys


def is_hydras(item: Override) -> bool:
    """Whether an override is of a key that Hydra's app reads; the search path is read by all."""
    key = item.key_or_group
    return key == "hydra" or (key.startswith(("hydra.", "hydra/")) and key != "hydra.searchpath")


def with_searched(arguments: list[str]) -> list[str]:
    """Returns the arguments with --config-dir replaced by the equivalent hydra.searchpath, an override, so that it is
    part of the command recorded for each point."""
    made: list[str] = []
    left = iter(arguments)
    for item in left:
        flag, equals, value = item.partition("=")
        if flag not in ("--config-dir", "-cd"):
            made.append(item)
            continue
        named = value if equals else next(left, "")
        folder = Path(named).absolute()
        if not named.strip() or not folder.is_dir():
            raise ConfigError(f"{flag} is {named!r}; name a folder of your own options, as {flag}=my_conf")
        made.append(f"hydra.searchpath=[{literal(f'file://{folder}')}]")
    return made


def searched(overrides: Sequence[str]) -> list[str]:
    """Returns those of the overrides that name folders of the user's own options."""
    return [item for item in overrides if item.startswith("hydra.searchpath=")]


def refuse_repeated(arguments: Iterable[str]) -> None:
    """Raises ConfigError if a command gives a key more than once, also within mappings."""
    items = [item for item in arguments if "=" in item and not item.startswith("-")]
    for key, num in Counter(chain.from_iterable(map(keys_in, items))).items():
        if num > 1:
            given = [item.partition("=") for item in items]
            values = ",".join(value.strip("[]") for name, _, value in given if name.lstrip("+") == key)
            hint = {
                OVERLAYS: f"lay several over one another as {key}=[{values}]",
                "hydra.searchpath": f'in place of several --config-dir give "{key}=[{values}]"',
            }.get(key, "give it once")
            raise ConfigError(f"{key} is given {num} times, and only the last would count; {hint}")


def _keys(items: list[Override], library: Library, chosen: Mapping[str, str | None]) -> Keys:
    """Returns the keys of the options that the overrides choose. Raises ConfigError for an unknown option."""
    given = {
        name: _named(library, name, item)
        for name, item in _choices(items).items()
        if not (item.is_add() and name.startswith("hydra/"))  # it may be in a place that only Hydra knows
    }
    overlays = given.pop(OVERLAYS, [])
    base = {**defaults(), **chosen}
    laid = [{**base, **library.of_overlay(str(overlay))} for overlay in overlays] or [base]
    options = {name: list(dict.fromkeys(one.get(name, base.get(name)) for one in laid)) for one in laid for name in one}
    return Keys(library, options | {name: names for name, names in given.items() if names} | {OVERLAYS: overlays})


def for_hydra(overrides: Sequence[str], keys: Keys) -> list[str]:
    """Returns those of the overrides that Hydra composes for its own keys, which may take values from them: in a sweep,
    those that all points have. With `key=null` before each policy that is given as a class, as Hydra would merge the
    class into the preset's class and parameters. keys: those of all the options."""
    made: list[str] = []
    for text, item in zip(overrides, map(parsed, overrides), strict=True):
        if not is_hydras(item) and (item.is_sweep_override() or not all(_has(keys, item))):
            continue
        if item.key_or_group in POLICIES and "_target_" in text:
            made.append(f"{item.key_or_group}=null")
        made.append(text)
    return made


def of_one_point(overrides: Sequence[str], keys: Keys) -> list[str]:
    """Returns the overrides of one point, without keys that its options do not have: in `backend=sim,real
    backend.pace=probe_scaled`, only the points of the real engine get the pace. keys: those of all the sweep's options;
    what none of them has stays, to be refused."""
    items = [parsed(text) for text in overrides]
    own = _keys(items, keys.library, {})
    return [
        text for text, item in zip(overrides, items, strict=True) if any(_has(own, item)) or not any(_has(keys, item))
    ]


def combinations(choices: Mapping[str, Sequence[str]], keys: Keys) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yields (the swept ones of its overrides, all its overrides) of each point. As in Hydra, the last key varies
    fastest. choices: by key, an override for each of its values. keys: those of all the sweep's options."""
    swept = [key for key, values in choices.items() if len(values) > 1]
    check_num_points(prod(map(len, choices.values())), " × ".join(swept))
    known = set()
    for items in product(*choices.values()):
        own = of_one_point(items, keys)
        told = tuple(item for key, item in zip(choices, items, strict=True) if key in swept and item in own)
        if told not in known:  # else it differs only in keys that its options do not have
            known.add(told)
            yield told, own


def _has(keys: Keys, item: Override) -> list[bool]:
    """Whether each chosen option of a key's group has it; [True] for added keys and for what is not a group's key."""
    group, _, name = item.key_or_group.partition(".")
    is_key = group in GROUPS and name and not item.is_add() and not item.is_force_add() and not item.is_delete()
    return keys.has(item.key_or_group) if is_key else [True]


def _check(item: Override, keys: Keys) -> None:
    """Checks one override. Raises ConfigError with a one-line message."""
    key = item.key_or_group
    if key.startswith("hydra.sweeper.params"):
        raise ConfigError(f"{item.input_line}: an overlay's file says so; here give key=a,b with -m")
    if item.is_delete() and key != OVERLAYS:
        raise ConfigError(f"{item.input_line}: a run has all of its keys; give this one a value")
    if key in ("hydra/job_logging", "hydra/hydra_logging"):
        raise ConfigError(f"{item.input_line}: a run writes its own log, run.log; leave it out")
    sets_keys = is_value(str(item.input_line))
    if key in (*GROUPS, OVERLAYS) and item.is_add() and not sets_keys:
        raise ConfigError(f"{item.input_line}: a run has its {key}; choose another without the +")
    group, _, name = key.partition(".")
    for value in _values(item, keys.library) if group in GROUPS and sets_keys else ():
        named = value if name == "name" else value.get("name") if not name and isinstance(value, dict) else None
        if named in keys.library.names(group) and [named] != keys.options[group]:
            raise ConfigError(f"{group}.name={named} would only rename what is chosen; choose it as {group}={named}")
        is_added = item.is_add() or item.is_force_add()
        if (name == "_target_" and not is_added) or (not name and isinstance(value, dict) and "_target_" in value):
            raise ConfigError(whole_class(group))


def chooses(item: Override) -> bool:
    """Whether an override chooses an option of a group, or deletes it."""
    return is_group(item.key_or_group) and not is_value(str(item.input_line))


def is_sweep(overrides: Sequence[str]) -> bool:
    """Whether an experiment among the overrides has hydra.mode: MULTIRUN."""
    return any(mode == "MULTIRUN" for _, mode in _of_overlays(overrides, "hydra.mode"))


def with_swept(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides over the sweep of the `experiment` that they name (`over_swept`)."""
    return over_swept(_swept(overrides), overrides)


def over_swept(swept: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Returns the overrides over an overlay's sweep, {key: values}. Where they sweep another key than loads and seeds,
    the overlay's question is not theirs; where they do that or set what it sweeps, its baseline may be no arm of
    theirs: it is the first arm, unless they name it."""
    from analysis.naming import is_of_trace, is_seed  # not at the top: the package imports Arrow, which is slow

    given = {item.partition("=")[0].lstrip("+"): item for item in overrides}
    of_arms = [key for key in given if not is_seed(key) and not is_of_trace(key) and key != "trace"]
    asks_else = bool(swept) and any(parsed(given[key]).is_sweep_override() for key in of_arms if key not in swept)
    values = {key: f"{key}={value}" for key, value in swept.items()}
    if asks_else:
        values["report.question"] = "report.question="
    if asks_else or any(key in swept for key in of_arms):
        values["report.baseline"] = "report.baseline=null"
    return list((values | given).values())


def _swept(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns what the `experiment` among the overrides sweeps: {key: values}."""
    if any(parsed(item).is_sweep_override() for item in overrides if item.startswith(f"{OVERLAYS}=")):
        return {}
    swept: dict[str, Any] = {}
    for file, params in _of_overlays(overrides, "hydra.sweeper.params"):
        values = params.values() if isinstance(params, dict) else [] if params is None else [None]
        if not all(isinstance(value, str | int | float) for value in values):
            raise ConfigError(f"{file}: hydra.sweeper.params is {shown(params)}; give a key its values as seed: 0,1")
        swept |= params or {}
    return swept


@contextmanager
def file_of_swept(overrides: Sequence[str]) -> Iterator[None]:
    """Context in which an error about a key that a file of the user's own experiments sweeps begins with that file.
    overrides: those of the sweep, with what the experiments sweep."""
    try:
        yield
    except ConfigError as error:
        choices = [item for item in overrides if item.startswith((f"{OVERLAYS}=", "hydra.searchpath="))]
        for file, params in _of_overlays(choices, "hydra.sweeper.params"):
            swept = "|".join(re.escape(key) for key, values in (params or {}).items() if f"{key}={values}" in overrides)
            if swept and not file.is_relative_to(CONF) and re.search(rf"\b({swept})(?![\w.])", str(error)):
                raise ConfigError(f"{file}: {error}") from None
        raise


def refuse_swept(overrides: Sequence[str]) -> None:
    """Raises ConfigError if the `experiment` of a single run sweeps keys that the overrides do not set."""
    given = {item.partition("=")[0].lstrip("+") for item in overrides}
    if keys := " and ".join(key for key in _swept(overrides) if key not in given):
        raise ConfigError(f"the experiment sweeps {keys}: `testbed run -m` makes all runs; for one, give each a value")


def _of_overlays(overrides: Sequence[str], key: str) -> list[tuple[Path, Any]]:
    """Returns each file of the experiments among the overrides and what it says of a key; None if it says nothing."""
    library, overlay = library_of(overrides), _choices([parsed(text) for text in overrides]).get(OVERLAYS)
    names = [] if overlay is None else _names(library, overlay)
    contents = [found for name in names if isinstance(name, str) for found in library.files(OVERLAYS, name)]
    found = [(file, OmegaConf.select(OmegaConf.create(content), key)) for file, content in contents]
    return [(file, OmegaConf.to_container(one) if OmegaConf.is_config(one) else one) for file, one in found]


@cache
def defaults() -> dict[str, str]:
    """Returns the default option of each group."""
    return {"hydra/launcher": "basic"} | chosen_by(read_option(CONF / "config.yaml"))


def library_of(overrides: Sequence[str]) -> Library:
    """Returns the library of options, including the folders in hydra.searchpath."""
    folders: list[Path] = []
    for item in (item for item in map(parsed, overrides) if item.key_or_group == "hydra.searchpath"):
        places = item.value()
        if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
            raise ConfigError(f"{item.input_line}: give a list of folders, as 'hydra.searchpath=[file://my_conf]'")
        folders += map(_folder, places)
    return Library(tuple(folders))


def _folder(place: str) -> Path:
    """Returns the folder of a Hydra search path entry: file://folder or pkg://module."""
    kind, _, name = place.rpartition("://")
    if kind != "pkg":
        return Path(name)
    try:
        return Path(str(files(name)))
    except ImportError:
        raise ConfigError(f"hydra.searchpath: there is no package {name!r}") from None


def _choices(items: list[Override]) -> dict[str, Override]:
    """Returns, by group, the override that chooses its option; the last one if there are several."""
    made = [item for item in items if chooses(item) and not item.is_delete() and item.package is None]
    return {item.key_or_group: item for item in made}


def _values(item: Override, library: Library) -> list[Any]:
    """Returns an override's single value, or its swept values; none if the sweep is not a list."""
    try:
        return [parsed(text).value() for text in swept_values(item, library)]
    except ConfigError:
        return []  # reported where the sweep is made


def check_num_points(num_points: int, sweep: str | None) -> None:
    """Raises ConfigError for a sweep of more than MAX_POINTS: they are all composed before the first one runs."""
    if num_points > MAX_POINTS:
        raise ConfigError(f"{sweep}: more than {MAX_POINTS:,} points; sweep fewer at a time")


def swept_values(item: Override, library: Library) -> list[str]:
    """Returns key=value for each value of an override; for a glob, those of the matching options. Raises ConfigError if
    a sweep has none, or is not a list."""
    if not item.is_sweep_override():
        return [str(item.input_line)]
    key, pattern = item.get_key_element(), item.value()
    if not item.is_discrete_sweep():
        raise ConfigError(f"{item.input_line}: only lists of values are swept: {key}=a,b,c")
    try:
        if isinstance(pattern, Glob):
            values = pattern.filter(library.names(item.key_or_group))
        else:
            if isinstance(pattern, RangeSweep):  # the only sweep that can be longer than its text
                check_num_points(sum(1 for _ in islice(pattern.range(), MAX_POINTS + 1)), item.input_line)
            values = list(item.sweep_iterator(_as_typed))
    except (ValueError, TypeError, HydraException) as error:
        raise ConfigError(f"{item.input_line}: {' '.join(str(error).split())}; give values as {key}=a,b,c") from None
    if not values:
        raise ConfigError(f"{item.input_line} has no values; give some, as {key}=a,b,c")
    return [f"{key}={value}" for value in values]


def _as_typed(value: Any) -> str:
    """Returns a swept value as users type it: Hydra writes True for true."""
    return literal(value) if isinstance(value, bool) else Transformer.str(value)


def _names(library: Library, item: Override) -> list[Any]:
    """Returns the names of the options that an override chooses; experiment=[a,b] chooses several, applied in order."""
    values = _values(item, library)
    is_list = item.key_or_group == OVERLAYS and len(values) == 1 and isinstance(values[0], list)
    return values[0] if is_list else values


def _named(library: Library, group: str, item: Override) -> list[str | None]:
    """Returns the options that an override chooses. Raises ConfigError for an unknown option."""
    names = library.names(group)
    found: list[str | None] = []
    for value in _names(library, item):
        if value is None and group.startswith("hydra/"):
            found.append(None)
            continue
        if not isinstance(value, str) or not value:
            what = "names no option" if value in ("", None) else "is no name of an option"
            raise ConfigError(
                f"{item.input_line} {what}; expected key=value, and for {group} one of: {', '.join(names)}"
            )
        option = value.removesuffix(".yaml")
        if group == "hydra/launcher" and option not in names and option in _EXTRAS:
            raise ConfigError(f"{item.input_line} needs a package that is not installed: pip install {_EXTRAS[option]}")
        if names and option not in names and library.file(group, option) is None:
            near = (file for folder in library.folders for file in (folder / group).glob("*") if file.is_file())
            if file := next((file for file in near if option in (file.stem, file.name)), None):
                raise ConfigError(f"{file}: the file of an option ends in .yaml; rename it to {file.stem}.yaml")
            keys = [key for key, policies in POLICIES.items() if value in policies]
            elsewhere = f" (a value of {', '.join(keys)})" * bool(keys)
            if not (keys or library.folders or group.startswith("hydra/") or nearest(value, names)):
                elsewhere = " (one of your own is for `testbed run --config-dir=<its folder>`)"
            raise ConfigError(unknown(f"{group} has no option {value!r}{elsewhere}", value, names))
        found.append(option)
    if not names:
        raise ConfigError(f"{item.input_line}: there is no group {group!r}")
    return found


def is_value(override: str) -> bool:
    """Whether an override only sets or adds a key of the run: not a key of Hydra's, not the choice of an option."""
    key, _, value = override.lstrip("+").partition("=")
    name, dot, _ = key.partition(".")
    return name in PLAIN or (name in GROUPS and (dot == "." or value.lstrip().startswith(("{", "choice({"))))
