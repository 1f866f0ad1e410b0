"""The identity of a run: configuration, files, the user's own classes, the testbed's code.

Two runs with one identity are the same run. Groups that only judge a run (`slo`, `report`) and settings of the command
are not part of it. Owns the hashes and the text about differences; does not know where runs are stored.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import file_digest
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from xxhash import xxh64

from experiments.configuration.config import FILE_KEYS, JUDGING, RunConfig
from experiments.configuration.own_class import imported
from experiments.configuration.own_source import VALUES, reached
from experiments.runs.environment import describe_versions, source_hash
from experiments.wiring.foreign import is_foreign, named_classes
from testbed.errors import ConfigError
from testbed.foreign_text import some

_LARGE_BYTES = 2**28  # above this, size and modification time identify a file in a folder (weights), not its content


@dataclass(frozen=True, slots=True)
class Identity:
    """Hashes, and the package's version. files: by path as configured; classes: by module. "": does not exist."""

    config: str
    files: dict[str, str]
    classes: dict[str, str]
    code: str
    version: str

    @property
    def name(self) -> str:
        """A folder name, `<configuration>-<the rest>`: equal configurations have the same first part."""
        return f"{self.config[:12]}-{_of_tree([self.files, self.classes, self.code])[:8]}"

    def is_of(self, manifest: dict[str, Any]) -> bool:
        """Whether the run with this manifest has this identity. Ignores versions, as the hash of the code is exact."""
        kept = manifest.get("identity")
        return isinstance(kept, dict) and {**asdict(self), "version": kept.get("version")} == kept

    def changes_since(self, manifest: dict[str, Any], defaults: Sequence[str] = ()) -> str:
        """Returns, in words, how a run of the same settings differs from this identity. defaults: the keys of the two
        configurations that differ nevertheless."""
        kept = manifest.get("identity")
        if not isinstance(kept, dict):
            return "it does not say what it was made from"
        said = [f"the file {name} changed" for name in _differing(kept.get("files"), self.files)]
        modules = _differing(kept.get("classes"), self.classes)
        said += [f"the class file {name.replace('.', '/')}.py changed" for name in modules]
        if kept.get("code") != self.code:
            before = kept.get("version")
            said.append("the testbed's code changed" + (f" ({before} → {self.version})" * (before != self.version)))
        if defaults:
            said.append(f"the defaults changed: {some([*defaults])}")
        return "; ".join(said) or "its configuration is another"


def identity_of(config: RunConfig) -> Identity:
    """Returns the identity of a configuration; reads the files that it names, each only once unless it changes."""
    decides = {key: value for key, value in config.raw.items() if key not in JUDGING}
    files = {name: _of_path(Path(name)) for name in sorted(set(_names_of_files(decides)))}
    version = describe_versions()["llm-serving-testbed"]
    return Identity(_of_tree(decides), files, _classes_in(decides), source_hash(), version)


def edited_since_import(config: RunConfig) -> str:
    """Returns a sentence if a file of the user's classes has changed since this process imported it, as may be in a
    notebook; empty if none has. Imports what the configuration names."""
    for _, target in named_classes(config.raw):
        with suppress(ConfigError):  # the error comes where the class is made
            imported("", target)
    running = [(name, *_RUNNING[name][1:]) for name in _classes_in(config.raw) if name in _RUNNING]
    edited = [(name, file, now) for name, file, then in running if (now := _of_path(file)) != then]
    if not edited:
        return ""
    name, file, now = edited[0]
    return (  # `now` is told as Python shows a warning of one text once
        f"{file} has changed since it was imported (to {now[:8] or 'nothing'}), and what runs is the old one; a new "
        f"Python takes the new one, as does importlib.reload(sys.modules[{name!r}]), then of each module that imports "
        "from it"
    )


def _differing(kept: Any, now: dict[str, str]) -> list[str]:
    before = kept if isinstance(kept, dict) else {}
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _of_tree(tree: Any) -> str:
    return xxh64(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()


# --- files ---


def _names_of_files(tree: Any, *, is_of_class: bool = False) -> Iterator[str]:
    """Yields values that name files: those of FILE_KEYS, and existing paths anywhere in a user's class's parameters."""
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    is_of_class = is_of_class or (isinstance(tree, dict) and "_target_" in tree)
    for key, value in items:
        if not isinstance(value, str):
            yield from _names_of_files(value, is_of_class=is_of_class)
        elif key in FILE_KEYS or (is_of_class and _exists(value)):
            yield value


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(name).exists()
    except (OSError, ValueError):  # too long, or not a valid path
        return False


def _of_path(path: Path) -> str:
    """Returns the hash of a file's content, or of all files in a folder; "" if it cannot be read."""
    try:
        if not path.is_dir():
            return _of_file(path)
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        return _of_tree([[file.relative_to(path).as_posix(), _of_file(file, _LARGE_BYTES)] for file in inside])
    except (OSError, ValueError):
        return ""  # the error is reported where the file is used


def _of_file(file: Path, most_bytes: float = math.inf) -> str:
    stat = file.stat()
    if stat.st_size > most_bytes:
        return f"{stat.st_size} {stat.st_mtime_ns}"
    return _of_content(file.absolute(), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _of_content(path: Path, size: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return file_digest(file, xxh64).hexdigest()


# --- the user's classes ---


def _classes_in(tree: Any) -> dict[str, str]:
    """Returns {module: hash} for the classes that a configuration names."""
    return {name: content for _, target in named_classes(tree) for name, content in _class_files(target).items()}


def _class_files(target: str) -> dict[str, str]:
    """Returns {module: hash} for the class's module and for the modules that it imports, directly or indirectly, from
    its own folder: the user's own modules, no installed packages."""
    found = dict(_modules(target))
    if not found:
        return {target: _of_cell(target)}
    file = next(iter(found.values()))
    root = file.parents[1] if file.name == "__init__.py" else file.parent
    todo = list(found.items())
    while todo:
        importing, file = todo.pop()
        for name in _imported(importing, file, _of_path(file)):
            for module, source in _modules(name):
                is_beside = source.is_relative_to(root) and "site-packages" not in source.relative_to(root).parts
                if module not in found and is_beside:
                    found[module] = source
                    todo.append((module, source))
    return {name: _of_running(name, found[name]) for name in sorted(found)}


_RUNNING: dict[str, tuple[Any, Path, str]] = {}  # module -> the spec of its import, its file, and what this held then


def _of_running(name: str, file: Path) -> str:
    """Returns the hash of what this process runs of a module: the file's content when it was first looked at after its
    import, or now if it is not imported."""
    content, module = _of_path(file), sys.modules.get(name)
    if module is None:
        return content
    if name not in _RUNNING or _RUNNING[name][0] is not module.__spec__:  # a reload makes another, equal one
        _RUNNING[name] = (module.__spec__, file, content)
    return _RUNNING[name][2]


def _of_cell(target: str) -> str:
    """Returns the hash of a class that a notebook's cell defines, with the classes, functions and plain values that it
    names there; "" if it has no source."""
    try:
        found = [(one, source) for one, source in reached(imported("", target)) if source or isinstance(one, VALUES)]
    except ConfigError:
        return ""
    return _of_tree([source or repr(one) for one, source in found]) if found else ""


def _modules(dotted: str) -> Iterator[tuple[str, Path]]:
    """Yields each module on the path of a dotted name, with its source file. Imports nothing."""
    parts = dotted.split(".")
    places: Any = None
    for depth, _ in enumerate(parts, 1):
        name = ".".join(parts[:depth])
        spec = _spec(name) if depth == 1 else PathFinder.find_spec(name, places)
        if spec is None:
            return
        if spec.origin is not None and spec.origin.endswith(".py"):
            yield name, Path(spec.origin)
        places = spec.submodule_search_locations
        if places is None:
            return


def _spec(name: str) -> ModuleSpec | None:
    if name == "__main__":  # it has no spec if it is a script, and no file in a notebook
        file = getattr(sys.modules[name], "__file__", None)
        return spec_from_file_location(name, file) if file else None
    try:
        return find_spec(name) if name and is_foreign(name) else None
    except (ImportError, ValueError):
        return None


@lru_cache(maxsize=4096)
def _imported(module: str, file: Path, content: str) -> list[str]:
    """Returns the dotted names that a source file imports; none if it cannot be read or parsed. content: its hash."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: None if file.name == "__init__.py" else -1]
            above = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names
