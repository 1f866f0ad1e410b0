"""Decides whether the compiled or the interpreted core runs, once, when `testbed` is first imported.

Both have the same source. mypyc compiles the files that pyproject.toml lists (`[tool.testbed]`) to extension modules.
setup.py puts these into `testbed/_compiled/<tag>/`, where Python finds them only through the finder below, with a
manifest of both. If a source has changed since, or a module is missing or is not the one that was built, all files
run interpreted, and one line on stderr reports it. So a compiled module that is older than its source is never
used silently, and compiled and interpreted modules are never mixed.

TESTBED_COMPILED=0: interpreted. =1: compiled, or an error. Not set: compiled if the modules are there and up to date.
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
_SAID = "TESTBED_COMPILED_SAID"  # in the environment, so that child processes do not repeat this process's line


class Core(NamedTuple):
    """The decision. mode: compiled or interpreted. why: the compiler, or the reason; without a full stop."""

    mode: str
    why: str
    modules: tuple[str, ...] = ()  # the compiled ones

    def __str__(self) -> str:
        return f"{self.mode} ({self.why})"


class _Finder:
    """Finds the compiled modules, and no others."""

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
    """Returns the decision of this process."""
    assert _core is not None, "testbed/__init__.py decides"
    return _core


def describe() -> str:
    """Returns one line for tables and manifests: `core: compiled (mypyc 2.4.1, gcc 12.2.0)`."""
    return f"core: {current()}"


def decide() -> None:
    """Decides, before any module that may be compiled is imported. Raises SystemExit if TESTBED_COMPILED=1 cannot be
    met."""
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
    """Returns why the compiled modules cannot be used. None: they can, and the finder is installed."""
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
    except ImportError as error:  # e.g. built with another C library, or a file is missing
        sys.meta_path.remove(finder)
        return f"not loadable ({' '.join(str(error).split())})"
    return None


def _say(line: str) -> None:
    if _SAID not in os.environ:
        os.environ[_SAID] = "1"
        print(line, file=sys.stderr)


# --- the files that setup.py writes ---


def folder_in(root: str) -> str:
    """Returns the folder of the modules for this Python. root: the folder that has `testbed/`."""
    return os.path.join(root, "testbed", "_compiled", SUFFIX.split(".")[1])


def file_of(folder: str, module: str) -> str:
    return os.path.join(folder, *module.split(".")) + SUFFIX


def read_manifest(folder: str) -> dict[str, Any]:
    """Returns what `write_manifest` wrote; empty if there is no manifest."""
    try:
        with open(os.path.join(folder, MANIFEST), encoding="utf-8") as file:
            made: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        return {}
    return made


def write_manifest(root: str, folder: str, sources: Iterable[str], **described: Any) -> None:
    """Writes what the modules in `folder` and their sources are. sources: files, relative to root."""
    found = {source: _state(os.path.join(root, source)) for source in sources}
    built = {name: _state(file_of(folder, name)) for name in _built(described)}
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
        json.dump(described | {"built": built, "sources": found}, file, indent=1)


def changed_sources(root: str, made: dict[str, Any]) -> list[str]:
    """Returns the sources that have changed since the build."""
    return [source for source, state in made["sources"].items() if not _is_still(os.path.join(root, source), state)]


def damaged_modules(folder: str, made: dict[str, Any]) -> list[str]:
    """Returns the built modules, the library first, that are missing or not as they were built."""
    built = made.get("built", {})
    return [name for name in _built(made) if name not in built or not _is_still(file_of(folder, name), built[name])]


def _built(made: dict[str, Any]) -> tuple[str, ...]:
    return (made["library"], *made["modules"]) if made.get("modules") else ()


def _state(path: str) -> tuple[int, int, str]:
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns, digest_of(path)


def _is_still(path: str, state: tuple[int, int, str]) -> bool:
    """Whether a file is what `_state` saw. One with the same size and time counts as unchanged."""
    size, time_ns, digest = state
    try:
        now = os.stat(path)
        return now.st_size == size and (now.st_mtime_ns == time_ns or digest_of(path) == digest)
    except OSError:
        return False


def c_compiler() -> list[str]:
    """Returns the command of the C compiler: what CC says, else the one that built this Python, else, if that is not
    here, `cc`: Pythons of conda and uv were built elsewhere."""
    import shlex  # not at the top: only needed to compile
    import shutil
    import sysconfig

    named = os.environ.get("CC")
    command = shlex.split(named or sysconfig.get_config_var("CC") or "cc")
    return command if named or shutil.which(command[0]) else ["cc"]


def digest_of(path: str) -> str:
    """Returns the hash with which Python itself compares a .pyc file with its source: fast, and needs no import."""
    with open(path, "rb") as file:
        return source_hash(file.read()).hex()
