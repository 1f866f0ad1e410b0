"""Builds the compiled core: `pip install` does it, and `python setup.py compile --inplace` in a checkout.

All else stands in pyproject.toml, the list of what is compiled too (`[tool.testbed] compile`). What cannot be built is
told in one line, and the package is installed without it: everything works, slower. testbed/compiled.py decides at
import whether the result is used; what lies in the folder, and how the manifest is written, stands there.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Command, Distribution, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
LIBRARY = "compiled_core"
DISTRIBUTION = "llm-serving-testbed"
OPT_LEVEL = "2"  # 3 takes a third longer to build, and the simulator is no faster
# The first: looking for what to warn of takes half as long again. The others: calls inside the library need no look-up.
FLAGS = ("-w", "-fno-semantic-interposition", "-fvisibility=hidden")
# Types are checked by `make types`; here only those of this repository and of Python's library count, so that the same
# code comes out whether numpy and its like are installed or not.
MYPY = ("--config-file=", "--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent",
        f"--cache-dir={os.devnull}")  # fmt: skip


class UnbuildableError(Exception):
    """Why there will be no compiled core, in one line."""


class Compile(Command):
    """Compiles into the wheel, or into the checkout (--inplace, and where the installation is editable)."""

    description = "compile the core with mypyc"
    # lists, as setuptools wants them of a command's class
    user_options = [("inplace", "i", "into this checkout"), ("build-lib=", "b", "where the wheel is put together")]  # noqa: RUF012
    boolean_options = ["inplace"]  # noqa: RUF012

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.inplace = False
        self.editable_mode = False  # set by setuptools

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        root = ROOT if self.inplace or self.editable_mode else Path(str(self.build_lib))
        os.chdir(ROOT)
        line, is_compiled = outcome(root)
        print(f"compiled core: {line}")
        is_asked_for = os.environ.get(compiled.VARIABLE) == "0"
        if not (is_compiled or self.inplace or is_asked_for):  # pip shows it even if it is quiet, if it is new enough
            warnings.warn_explicit(f"compiled core: {line}", UserWarning, DISTRIBUTION, 1)

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildOnAllCores(build_ext):
    """The files of the library side by side, not only its modules."""

    def build_extensions(self) -> None:
        compile_one_by_one = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = list(pool.map(lambda source: compile_one_by_one([source], **options), sources))
            return [path for paths in made for path in paths]

        self.compiler.compile = compile_all
        super().build_extensions()


class Binary(Distribution):
    """A wheel with compiled modules is for one Python on one platform."""

    def has_ext_modules(self) -> bool:
        return True


def outcome(root: Path) -> tuple[str, bool]:
    """Builds the modules below root, if they are not there and fresh. Returns a line, and whether they are there."""
    folder = Path(compiled.folder_in(str(root)))
    if os.environ.get(compiled.VARIABLE) == "0":
        if root != ROOT:
            shutil.rmtree(folder, ignore_errors=True)  # what an earlier wheel left in build/
        return f"not built: {compiled.VARIABLE}=0", False
    files = listed()
    made = compiled.read_manifest(str(folder))
    is_whole = made.get("modules") == [module_of(file) for file in files] and made.get("recipe") == RECIPE
    is_whole = is_whole and not compiled.damaged_modules(str(folder), made)
    if is_whole and not compiled.changed_sources(".", made):
        return f"fresh ({made['compiler']})", True
    work = Path("build") / f"compiled-{folder.name}"
    shutil.rmtree(work, ignore_errors=True)
    modules = work / "modules"
    modules.mkdir(parents=True)
    try:
        described = compile_files(files, work, modules)
        said = f"built, {len(files)} modules ({described['compiler']})"
    except UnbuildableError as reason:
        shutil.rmtree(modules)
        modules.mkdir()
        described = {"failed": str(reason)}
        said = f"not built: {reason}; everything works, interpreted, slower"
    compiled.write_manifest(".", str(modules), watched(files), **described)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(modules, folder)  # whole, and never written over: a process may have the old files in use
    return said, "failed" not in described


def listed() -> list[str]:
    """The files to compile, in order: the patterns of pyproject.toml, less those behind a `!`, less `__init__.py`."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["testbed"]["compile"]
    files: set[str] = set()
    for pattern in patterns:
        found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern.removeprefix("!"))}
        assert found, f"pyproject.toml, [tool.testbed] compile: no file is {pattern}"
        files = files - found if pattern.startswith("!") else files | found
    return sorted(file for file in files if not file.endswith("/__init__.py"))


def watched(files: list[str]) -> list[str]:
    """`files` and what of this repository they import, in turn: mypyc copies constants out of modules it reads."""
    known: set[str] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file not in known:
            known.add(file)
            waiting += imported_by(file)
    return sorted(known)


def imported_by(file: str) -> Iterator[str]:
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"), file)
    except SyntaxError:
        return  # mypyc has said so
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            path = name.replace(".", "/") + ".py"
            if os.path.exists(path):
                yield path


def module_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


def compile_files(files: list[str], work: Path, target: Path) -> dict[str, Any]:
    """Extension modules of `files` below `target`. Returns what the manifest says of them."""
    c_compiler = describe_compiler()
    if compiled.c_compiler() == ["cc"]:
        os.environ["CC"] = "cc"  # setuptools would take the one that built this Python
    extensions = translated(files, work)
    is_unix = c_compiler.split()[0] in ("gcc", "clang")
    for extension in extensions:
        kept = [flag for flag in extension.extra_compile_args if not flag.startswith("-W")]
        extension.extra_compile_args = [*kept, *FLAGS] if is_unix else kept
    command = BuildOnAllCores(Distribution({"ext_modules": extensions}))
    command.build_lib, command.build_temp = str(target), str(work)
    command.parallel = os.cpu_count()
    command.ensure_finalized()
    try:
        command.run()
    except Exception as error:
        raise UnbuildableError(f"{c_compiler} failed; `make compile` shows its message") from error
    return {
        "compiler": f"mypyc {importlib.metadata.version('mypy')}, {c_compiler}",
        "flags": extensions[0].extra_compile_args,
        "library": extensions[0].name,
        "recipe": RECIPE,
        "modules": [module_of(file) for file in files],
    }


def translated(files: list[str], work: Path) -> list[Extension]:
    """C, by mypyc: one library of all modules, a file for each, and for each a small one that Python finds it by."""
    said = io.StringIO()
    try:
        from mypyc.build import mypycify

        with contextlib.redirect_stdout(said):
            options = {"opt_level": OPT_LEVEL, "debug_level": "0", "multi_file": True, "target_dir": str(work)}
            return list(mypycify([*MYPY, *files], group_name=LIBRARY, **options))
    except ImportError as error:
        raise UnbuildableError(f"mypyc is not installed ({first_line(error)})") from error
    except (Exception, SystemExit) as error:
        errors = [line for line in said.getvalue().splitlines() if ": error:" in line]
        print(*errors, sep="\n")
        raise UnbuildableError(f"mypyc refused the source ({errors[0] if errors else first_line(error)})") from error


def describe_compiler() -> str:
    """`gcc 12.2.0`, of the compiler that extensions are built with."""
    if sys.implementation.name != "cpython":
        raise UnbuildableError("mypyc is for CPython")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise UnbuildableError("Python.h is missing (Debian and Ubuntu: apt install python3-dev)")
    if os.name == "nt":
        return "msvc"
    command = compiled.c_compiler()
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise UnbuildableError(f"no C compiler ({command[0]})") from None
    name = "clang" if "clang" in said else "gcc" if "Free Software Foundation" in said else command[0]
    number = re.search(r"\d+\.\d+(\.\d+)?", said.splitlines()[0])
    return f"{name} {number[0] if number else ''}".strip()


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _load(path: Path) -> ModuleType:
    """A module by its file: the package around it would ask whether it is compiled."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compiled = _load(ROOT / "testbed" / "compiled.py")
RECIPE = compiled.digest_of(__file__)
build.sub_commands.append(("compile", None))
if __name__ == "__main__":
    setup(distclass=Binary, cmdclass={"compile": Compile})
