"""The compiled core is used where it is fresh, never where its source is newer, and each run says which one it had.

Most of it is shown on a core of one small file, built in a folder of its own; skipped where nothing can be built.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from testbed import compiled

ROOT = Path(__file__).parents[1]
EXCUSES = ("no C compiler", "Python.h is missing", "mypyc is")  # for building nothing
PYPROJECT = """
[project]
name = "small"
version = "1"
[tool.setuptools]
py-modules = []
[tool.testbed]
compile = ["testbed/*.py", "!testbed/compiled.py", "!testbed/limits.py"]
"""
COUNTER = '''"""Compiled."""
from mypy_extensions import mypyc_attr

from testbed.limits import LIMIT


@mypyc_attr(allow_interpreted_subclasses=True)
class Counter:
    def __init__(self) -> None:
        self.total = 0

    def step(self) -> int:
        return 1

    def run(self) -> int:
        while self.total < LIMIT:
            self.total += self.step()
        return self.total
'''
# Attributes that would be macros of macOS (sys/cdefs.h and clang itself): in C, mypyc's `_used` is `__used`
MACROS = (
    r"\._(assert|block|cold|const|dead|deprecated|exported|nonnull|nullable|offsetof|pure|restrict|signed|single|strong|"
    r"unavailable|unused|used|volatile|weak)\b"
)
LIMITS = '"""Not compiled."""\nfrom typing import Final\n\nLIMIT: Final = 10\n'
SHOW = "from testbed import compiled; print(compiled.describe())"
ELSEWHERE = "import sysconfig; sysconfig.get_config_vars().update(CC='/nowhere/cc', LDSHARED='/nowhere/cc -shared')"
USE = "from testbed import counter; print(counter.Counter().run(), counter.__file__)"


@dataclass(frozen=True)
class Tree:
    """A checkout with one file to compile."""

    root: Path

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(compiled.VARIABLE)}
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.root, env=kept | {"PYTHONPATH": str(self.root)} | environment,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    def build(self, **environment: str) -> str:
        done = self.python("setup.py", "-q", "compile", "--inplace", **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def mode(self, **environment: str) -> str:
        done = self.python("-c", SHOW, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @property
    def folder(self) -> str:
        return compiled.folder_in(str(self.root))

    @property
    def library(self) -> str:
        return str(compiled.read_manifest(self.folder)["library"])

    def file_of(self, module: str) -> Path:
        return Path(compiled.file_of(self.folder, module))


def plant(root: Path) -> Tree:
    pytest.importorskip("setuptools")
    (root / "testbed").mkdir(parents=True)
    recipe = (ROOT / "setup.py").read_text()
    (root / "setup.py").write_text(recipe.replace('OPT_LEVEL = "2"', 'OPT_LEVEL = "0"'))  # built in half the time
    for name in ("__init__.py", "compiled.py"):
        shutil.copy2(ROOT / "testbed" / name, root / "testbed")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "testbed" / "counter.py").write_text(COUNTER)
    (root / "testbed" / "limits.py").write_text(LIMITS)
    return Tree(root)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    tree = plant(tmp_path_factory.mktemp("built") / "tree")
    said = tree.build()
    if said.startswith(tuple(f"compiled core: not built: {reason}" for reason in EXCUSES)):
        pytest.skip(said)
    assert said.startswith("compiled core: built, 1 modules (mypyc "), said
    return tree


@pytest.fixture
def tree(built: Tree, tmp_path: Path) -> Tree:
    shutil.copytree(built.root, tmp_path / "tree", ignore=shutil.ignore_patterns("build", "__pycache__"))
    return Tree(tmp_path / "tree")


# --- which one runs ---


def test_what_is_fresh_is_used(tree: Tree) -> None:
    done = tree.python("-c", f"{SHOW}; {USE}")
    assert done.stderr == ""
    mode, used = done.stdout.splitlines()
    assert mode.startswith("core: compiled (mypyc ")
    assert used.startswith("10 ")
    assert used.endswith(compiled.SUFFIX)
    assert tree.build().startswith("compiled core: fresh")


def test_a_source_with_another_time_and_the_same_text_is_fresh(tree: Tree) -> None:
    os.utime(tree.root / "testbed" / "counter.py", (1, 1))
    assert tree.mode().startswith("core: compiled")


@pytest.mark.parametrize("file", ["testbed/counter.py", "testbed/limits.py"])
def test_what_is_older_than_its_source_is_not_used_and_says_so_once(tree: Tree, file: str) -> None:
    """Also where what changed is not compiled: mypyc has copied the constant."""
    path = tree.root / file
    path.write_text(path.read_text().replace("total = 0", "total = 5").replace("10", "12"))
    child = f"import subprocess, sys; {USE}; subprocess.run([sys.executable, '-c', {USE!r}])"
    done = tree.python("-c", child)
    (line,) = done.stderr.splitlines()
    assert line == (
        f"the compiled core is older than its source ({file}): running interpreted; "
        "`make compile` or `pip install` builds it anew"
    )
    assert [used.endswith("counter.py") for used in done.stdout.splitlines()] == [True, True]
    assert f"core: interpreted (older than its source ({file}))" in tree.mode()


def test_a_rebuild_brings_it_back(tree: Tree) -> None:
    path = tree.root / "testbed" / "limits.py"
    path.write_text(LIMITS.replace("10", "13"))
    if shutil.which("cc"):  # as if this Python had been built with another one
        (tree.root / "sitecustomize.py").write_text(ELSEWHERE)
    assert tree.build().startswith("compiled core: built")
    assert tree.python("-c", USE).stdout.startswith("13 ")
    assert tree.mode().startswith("core: compiled")


def test_a_source_that_is_gone_counts_as_changed(tree: Tree) -> None:
    (tree.root / "testbed" / "limits.py").unlink()
    assert tree.mode().startswith("core: interpreted (older than its source")


def test_a_library_that_does_not_load_is_not_used(tree: Tree) -> None:
    file = tree.file_of(tree.library)
    time_ns = file.stat().st_mtime_ns
    file.write_bytes(bytes(file.stat().st_size))
    os.utime(file, ns=(time_ns, time_ns))
    done = tree.python("-c", f"{SHOW}; {USE}")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("the compiled core is not loadable (")
    assert "counter.py" in done.stdout


@pytest.mark.parametrize("happened", ["is gone", "is cut short", "is of another version"])
@pytest.mark.parametrize("name", ["library", "testbed.counter"])
def test_a_module_that_is_not_as_it_was_built_is_not_used_and_is_built_anew(
    tree: Tree, name: str, happened: str
) -> None:
    """A library's size is rounded up: one of another version often has the same."""
    name = tree.library if name == "library" else name
    file = tree.file_of(name)
    content = file.read_bytes()
    if happened == "is gone":
        file.unlink()
    else:
        file.write_bytes(content[:1000] if happened == "is cut short" else content[:-1] + bytes([content[-1] ^ 1]))
    done = tree.python("-c", f"{SHOW}; {USE}")
    (line,) = done.stderr.splitlines()
    assert line == (
        f"the compiled core is not as it was built ({name}): running interpreted; "
        "`make compile` or `pip install` builds it anew"
    )
    assert "counter.py" in done.stdout
    done = tree.python("-c", SHOW, TESTBED_COMPILED="1")
    assert done.stderr.startswith("error: TESTBED_COMPILED=1, but the core is not as it was built (")
    assert "not built: no C compiler" in tree.build(CC="/nowhere/cc")  # it would be built: a build takes seconds


def test_the_variable_forces_either(tree: Tree) -> None:
    assert tree.mode(TESTBED_COMPILED="0") == "core: interpreted (TESTBED_COMPILED=0)"
    assert tree.mode(TESTBED_COMPILED="1").startswith("core: compiled")
    (tree.root / "testbed" / "limits.py").write_text("")
    done = tree.python("-c", SHOW, TESTBED_COMPILED="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: TESTBED_COMPILED=1, but the core is older than its source (testbed/limits.py); "
        "`make compile` or `pip install` builds it anew\n"
    )


def test_where_nothing_is_built_only_a_demand_says_so(tmp_path: Path) -> None:
    tree = plant(tmp_path / "tree")
    done = tree.python("-c", f"{SHOW}; {USE}")
    assert done.stderr == ""
    assert done.stdout.startswith("core: interpreted (not compiled: nothing was built for this Python)\n10 ")
    done = tree.python("-c", SHOW, TESTBED_COMPILED="1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: TESTBED_COMPILED=1, but the core is not compiled: nothing was built")
    done = tree.python("-c", SHOW, TESTBED_COMPILED="yes")
    assert done.stderr.startswith("error: TESTBED_COMPILED=yes: it is 0 (interpreted), 1 (")


# --- what cannot be built stops nothing ---


def test_without_a_compiler_one_line_tells(tmp_path: Path) -> None:
    tree = plant(tmp_path / "tree")
    said = tree.build(CC="/nowhere/cc")
    if "Python.h" in said:
        pytest.skip(said)
    assert said == "compiled core: not built: no C compiler (/nowhere/cc); everything works, interpreted, slower"
    assert tree.mode() == "core: interpreted (not compiled: no C compiler (/nowhere/cc))"


def test_a_source_that_mypyc_refuses_is_named(tree: Tree) -> None:
    path = tree.root / "testbed" / "counter.py"
    path.write_text(path.read_text().replace("return 1", "return 'one'"))
    said = tree.build().splitlines()[-1]
    assert said.startswith("compiled core: not built: mypyc refused the source (testbed/counter.py:13: error: ")
    done = tree.python("-c", SHOW)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("core: interpreted (not compiled: mypyc refused the source (testbed/counter.py:13")


def test_the_build_can_be_left_out(tmp_path: Path) -> None:
    tree = plant(tmp_path / "tree")
    assert tree.build(TESTBED_COMPILED="0") == "compiled core: not built: TESTBED_COMPILED=0"
    assert not (tree.root / "testbed" / "_compiled").exists()


# --- a user's own class on top of a compiled one ---


def test_a_users_subclass_is_called_and_its_error_has_file_and_line(tree: Tree) -> None:
    (tree.root / "mine.py").write_text(
        "from testbed.counter import Counter\n\n\n"
        "class Mine(Counter):\n"
        "    def step(self):\n"
        "        if self.total > 7:\n"
        "            raise ValueError('my own')\n"
        "        return 3\n\n\n"
        "def go():\n"
        "    return Mine().run()\n"
    )
    done = tree.python("-c", "import mine; mine.go()", TESTBED_COMPILED="1")
    assert done.returncode == 1
    assert 'mine.py", line 7, in step' in done.stderr
    assert 'File "testbed/counter.py", line 17, in run' in done.stderr
    assert done.stderr.endswith("ValueError: my own\n")


def test_a_wrong_type_is_one_line(tree: Tree) -> None:
    (tree.root / "mine.py").write_text(
        "from testbed.counter import Counter\n\n\nclass Mine(Counter):\n    def step(self):\n        return 'three'\n"
    )
    done = tree.python("-c", "import mine; mine.Mine().run()", TESTBED_COMPILED="1")
    assert done.stderr.endswith("TypeError: int object expected; got str\n")


def test_a_compiler_that_only_the_builder_of_python_had_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setitem(sysconfig.get_config_vars(), "CC", f"'{sys.executable}' -B")
    assert compiled.c_compiler() == [sys.executable, "-B"]
    monkeypatch.setitem(sysconfig.get_config_vars(), "CC", "/nowhere/clang -pthread")
    assert compiled.c_compiler() == ["cc"]
    monkeypatch.setenv("CC", "/nowhere/cc")  # a user's word: said to be missing
    assert compiled.c_compiler() == ["/nowhere/cc"]


# --- this checkout ---


def patterns_of_compiled() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["testbed"]["compile"]


def test_what_is_listed_lies_where_the_choice_is_made_first() -> None:
    """Importing from a package begins with its `__init__.py`."""
    patterns = patterns_of_compiled()
    assert patterns
    for package in {pattern.removeprefix("!").partition("/")[0] for pattern in patterns}:
        statements = [ast.unparse(node) for node in ast.parse((ROOT / package / "__init__.py").read_text()).body]
        place = statements.index("compiled.decide()")
        before = [line for line in statements[:place] if line.startswith(("import ", "from "))]
        assert before[-1] == "from testbed import compiled", package
        assert all(line.startswith(("from __future__ ", "from typing ")) for line in before[:-1]), package
    taken = [pattern for pattern in patterns if not pattern.startswith("!") and fnmatch("testbed/compiled.py", pattern)]
    assert not taken or "!testbed/compiled.py" in patterns


def test_no_attribute_is_a_macro_of_macos() -> None:
    files = [file for pattern in patterns_of_compiled() if pattern[0] != "!" for file in ROOT.glob(pattern)]
    found = {f"{file}: {name}" for file in files for name in re.findall(MACROS, file.read_text())}
    assert files
    assert not found


def test_mypyc_takes_what_is_listed() -> None:
    """Where it was built at all: no compiler is no failure, a source that cannot be compiled is one."""
    failed = compiled.read_manifest(compiled.folder_in(str(ROOT))).get("failed", EXCUSES[0])
    assert failed.startswith(EXCUSES), failed


def test_the_modules_are_what_the_choice_says() -> None:
    from testbed.blocks import pool

    is_compiled = "testbed.blocks.pool" in compiled.current().modules
    assert str(pool.__file__).endswith(compiled.SUFFIX if is_compiled else "pool.py")
    assert (compiled.current().mode == "compiled") == bool(compiled.current().modules)
