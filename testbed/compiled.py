"""Which core runs: the compiled one, or the interpreted. Decided once, when `testbed` is first imported.

Both are the same source. mypyc makes extension modules of the files that pyproject.toml lists (`[tool.testbed]`);
setup.py puts them into `testbed/_compiled/<tag>/`, where Python finds them only through the finder below, with a
manifest of what they were made from, and how large they came out. If one of these files has changed since, or one of
the modules is gone or cut short, all run interpreted, and one line says so: never is a compiled module older than its
source used in silence, nor are the two mixed.

TESTBED_COMPILED=0: interpreted. =1: compiled, or not at all. Not set: compiled where it is there and fresh.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import source_hash, spec_from_file_location
from types import ModuleType
from typing import Any, NamedTuple

VARIABLE = "TESTBED_COMPILED"
REMEDY = "`make compile` or `pip install` builds it anew"
SUFFIX = EXTENSION_SUFFIXES[0]  # .cpython-311-x86_64-linux-gnu.so: two Pythons share a checkout
MANIFEST = "manifest.json"
_SAID = "TESTBED_COMPILED_SAID"  # in the environment: what this process has said, those that it starts do not repeat


class Core(NamedTuple):
    """What was decided. mode: compiled or interpreted. why: what compiled it, or why it is not; without a full stop."""

    mode: str
    why: str
    modules: tuple[str, ...] = ()  # that are compiled

    def __str__(self) -> str:
        return f"{self.mode} ({self.why})"


class _Finder:
    """Knows the compiled modules, and nothing else."""

    def __init__(self, folder: str, names: Iterable[str]) -> None:
        self._files = {name: file_of(folder, name) for name in names}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(name)
        if file is None:
            return None
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


_core: Core | None = None


def current() -> Core:
    """The decision of this process."""
    assert _core is not None, "testbed/__init__.py decides"
    return _core


def describe() -> str:
    """One line for tables and manifests to show: `core: compiled (mypyc 2.4.1, gcc 12.2.0)`."""
    return f"core: {current()}"


def decide() -> None:
    """Compiled or interpreted: before any module that may be either is imported. SystemExit where =1 cannot be."""
    global _core
    if _core is None:
        _core = _decide(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.environ.get(VARIABLE, ""))


def _decide(root: str, wish: str) -> Core:
    if wish not in ("", "0", "1"):
        raise SystemExit(f"error: {VARIABLE}={wish}: it is 0 (interpreted), 1 (compiled, or not at all), or not set")
    if wish == "0":
        return Core("interpreted", f"{VARIABLE}=0")
    made = read_manifest(folder_in(root))
    problem = _problem(root, made)
    if problem is None:
        return Core("compiled", made["compiler"], tuple(made["modules"]))
    if wish == "1":
        raise SystemExit(f"error: {VARIABLE}=1, but the core is {problem}; {REMEDY}")
    if made.get("modules"):
        _say(f"the compiled core is {problem}: running interpreted; {REMEDY}")
    return Core("interpreted", problem)


def _problem(root: str, made: dict[str, Any]) -> str | None:
    """Why the compiled modules cannot be used; None: they can, and the finder is in its place."""
    if not made.get("modules"):
        return f"not compiled: {made.get('failed', 'nothing was built for this Python')}"
    changed = changed_sources(root, made)
    if changed:
        return f"older than its source ({changed[0]}{' …' if len(changed) > 1 else ''})"
    damaged = damaged_modules(folder_in(root), made)
    if damaged:
        return f"not as it was built ({damaged[0]}{' …' if len(damaged) > 1 else ''})"
    finder = _Finder(folder_in(root), _built(made))
    sys.meta_path.insert(0, finder)
    try:
        import_module(made["library"])
    except ImportError as error:  # another C library than where it was built, a file that is not there
        sys.meta_path.remove(finder)
        return f"not loadable ({' '.join(str(error).split())})"
    return None


def _say(line: str) -> None:
    if _SAID not in os.environ:
        os.environ[_SAID] = "1"
        print(line, file=sys.stderr)


# --- what setup.py writes ---


def folder_in(root: str) -> str:
    """Where the modules for this Python lie, below the folder that has `testbed/`."""
    return os.path.join(root, "testbed", "_compiled", SUFFIX.split(".")[1])


def file_of(folder: str, module: str) -> str:
    return os.path.join(folder, *module.split(".")) + SUFFIX


def read_manifest(folder: str) -> dict[str, Any]:
    """What `write_manifest` wrote; empty where there is none."""
    try:
        with open(os.path.join(folder, MANIFEST), encoding="utf-8") as file:
            made: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        return {}
    return made


def write_manifest(root: str, folder: str, sources: Iterable[str], **described: Any) -> None:
    """Notes what the modules in `folder` were made from, and their sizes. sources: files, relative to root."""
    found = {source: _state(os.path.join(root, source)) for source in sources}
    sizes = {name: _size_of(folder, name) for name in _built(described)}
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
        json.dump(described | {"sizes": sizes, "sources": found}, file, indent=1)


def changed_sources(root: str, made: dict[str, Any]) -> list[str]:
    """Of the files that the modules were made from, those that are not as they were. One whose size and time are is."""
    changed = []
    for source, (size, time_ns, digest) in made["sources"].items():
        path = os.path.join(root, source)
        try:
            now = os.stat(path)
            is_same = now.st_size == size and (now.st_mtime_ns == time_ns or digest_of(path) == digest)
        except OSError:
            is_same = False
        if not is_same:
            changed.append(source)
    return changed


def damaged_modules(folder: str, made: dict[str, Any]) -> list[str]:
    """Of what was built, the library first, that which is not there or has another size by now."""
    sizes = made.get("sizes", {})
    return [name for name in _built(made) if sizes.get(name, -1) != _size_of(folder, name)]


def _built(made: dict[str, Any]) -> tuple[str, ...]:
    return (made["library"], *made["modules"]) if made.get("modules") else ()


def _size_of(folder: str, module: str) -> int | None:
    """In bytes; None: it is not there."""
    try:
        return os.stat(file_of(folder, module)).st_size
    except OSError:
        return None


def _state(path: str) -> tuple[int, int, str]:
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns, digest_of(path)


def digest_of(path: str) -> str:
    """The hash that Python itself compares a .pyc with its source by: fast, and nothing to import."""
    with open(path, "rb") as file:
        return source_hash(file.read()).hex()
