"""Who may know whom, and what the core must not do: checked in the source, and in what a process has loaded."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.source_tree import FILES, ROOMS, ROOT, relative, tree_of

FLOORS = {"testbed": 0, "sim": 1, "real": 1, "analysis": 1, "experiments": 2, "tests": 3}


@dataclass(frozen=True)
class Import:
    file: str  # relative to the repository
    line: int
    module: str  # absolute, the whole dotted name
    is_inside_function: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    """Every import, also those inside functions; those for type checkers only are none."""
    return imports_in_tree(tree_of(path), path.relative_to(ROOT).as_posix())


def imports_in_tree(tree: ast.AST, name: str, *, with_types: bool = False) -> Iterator[Import]:
    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        if not with_types and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, node.lineno, alias.name, inside)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = name.split("/")[: -node.level]
                module = ".".join([*package, module]).rstrip(".")
            for alias in node.names:  # `from testbed import records` imports testbed.records.schema
                yield Import(name, node.lineno, f"{module}.{alias.name}", inside)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return walk(tree, False)


def names_in_tree(tree: ast.AST, name: str) -> Iterator[Import]:
    """Strings that could lead to a module, wherever they stand: in import_module, after `python -m`, in a table.

    `sim` and `real` alone are backends' names, and may be said; but not to import_module, and to that no variable.
    """
    importers = ("import_module", "__import__", "run_module")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(rf"experiments|({'|'.join(FLOORS)})\.[\w.:]*", node.value):
                yield Import(name, node.lineno, node.value, True)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(importers):
            words = [str(word.value) for word in ast.walk(node) if isinstance(word, ast.Constant)]
            yield from (Import(name, node.lineno, word, True) for word in words or ["experiments"])


def running_up(tree: ast.AST, name: str) -> list[str]:
    """Whatever leads from a file to another room that is not on a floor below, type checkers' imports included."""
    room = name.partition("/")[0]
    found = [*imports_in_tree(tree, name, with_types=True), *names_in_tree(tree, name)]
    return [str(item) for item in found if item.top != room and FLOORS.get(item.top, -1) >= FLOORS[room]]


def imports_in(room: str) -> list[Import]:
    return [item for path in FILES if path.is_relative_to(ROOT / room) for item in imports_of(path)]


def is_part_of(item: Import, *packages: str) -> bool:
    return any(item.module == package or item.module.startswith(f"{package}.") for package in packages)


def refused(imports: list[Import], *packages: str) -> list[str]:
    return [str(item) for item in imports if is_part_of(item, *packages)]


# --- rooms ---


def test_the_core_needs_the_standard_library_and_xxhash() -> None:
    """And what compiled code needs (mypy_extensions, librt). Traces compute with numpy; Parquet and zstd are opened by
    the functions that need them, never at the top, and two files know Arrow: one converts, one writes records."""
    arrow, parquet = "testbed/arrow.py", "testbed/records/parquet.py"
    measured = ("testbed/specs/profiles.py", "testbed/specs/operator_tables.py")
    bad = []
    for item in imports_in("testbed"):
        is_trace = item.file.startswith("testbed/traces/")
        is_allowed = (
            item.top in sys.stdlib_module_names
            or item.top in ("testbed", "xxhash", "mypy_extensions", "librt")
            or (item.top == "numpy" and is_trace)
            or (item.top == "pyarrow" and item.is_inside_function and (is_trace or item.file in measured))
            or (item.top in ("numpy", "pyarrow") and item.file in (arrow, parquet))
        )
        is_heavy = is_part_of(item, "testbed.arrow") or is_part_of(item, "testbed.records.parquet")
        if not is_allowed or (is_heavy and not item.is_inside_function and item.file != parquet):
            bad.append(str(item))
    assert not bad


def test_only_what_keeps_traces_records_and_profiles_opens_files() -> None:
    """The state machine has no I/O: neither `open` nor a path, no clock, no thread, no randomness, no environment."""
    forbidden = ("time", "datetime", "random", "secrets", "threading", "multiprocessing", "asyncio", "os", "socket",
                 "subprocess", "logging", "tempfile", "uuid")  # fmt: skip
    writer = ("testbed/records/recorder.py", "testbed/records/tables.py", "testbed/records/parquet.py")  # has a thread
    with_files = ("testbed/traces/", "testbed/records/", "testbed/specs/hf_config.py", "testbed/output.py",
                  "testbed/specs/profiles.py", "testbed/specs/operator_tables.py")  # fmt: skip
    everything = [item for item in imports_in("testbed") if item.file != "testbed/compiled.py"]  # decides before all
    core = [item for item in everything if not item.file.startswith(with_files)]
    assert len(core) > 50, "nothing was looked at"
    assert not refused(core, *forbidden, "pathlib", "io")
    assert not refused([item for item in everything if "/traces/" not in item.file], *forbidden)
    assert not refused([item for item in everything if item.file not in writer], "concurrent")


PARTS = {  # of testbed: what each may import of the others, also for type checkers
    "testbed.blocks": (),
    "testbed.core": ("testbed.blocks",),
    "testbed.policies": ("testbed.blocks", "testbed.core"),
    "testbed.records": ("testbed.core", "testbed.specs", "testbed.traces"),
    "testbed.specs": ("testbed.core",),  # a step's shape, priced and profiled
    "testbed.traces": ("testbed.core",),
}
ANYONE_MAY = (
    "testbed.arrow", "testbed.checks", "testbed.composites", "testbed.errors", "testbed.foreign_text",
    "testbed.lazy_heap", "testbed.output", "testbed.streams", "testbed.seeds", "testbed.wording",
)  # fmt: skip


def types_included(part: str) -> list[Import]:
    """What the files of a package import, type checkers' imports included."""
    folder = ROOT / part.replace(".", "/")
    files = [path for path in FILES if path.is_relative_to(folder)]
    assert len(files) > 5, "nothing was looked at"
    return [item for path in files for item in imports_in_tree(tree_of(path), relative(path), with_types=True)]


def test_the_parts_stand_above_one_another() -> None:
    assert in_circles({part: set(others) for part, others in PARTS.items()}) == []


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_core_knows_only_those_that_it_may(part: str) -> None:
    own = [item for item in types_included(part) if item.top == "testbed"]
    assert not [str(item) for item in own if not is_part_of(item, part, *PARTS[part], *ANYONE_MAY)]


def test_policies_know_neither_the_loop_nor_the_recorder() -> None:
    """Of the core they see sequences, plans, the seams, and the step that a composition decides."""
    hidden = "batch commit digest planning preempting running scheduler serve thrash waiting"
    policies = types_included("testbed.policies")
    assert not refused(policies, *(f"testbed.core.{name}" for name in hidden.split()))
    assert not refused(policies, "testbed.records", "testbed.traces")


def test_requests_and_plans_know_no_blocks_and_blocks_no_requests() -> None:
    early = [
        item
        for item in types_included("testbed.core")
        if item.file.endswith(("/request.py", "/sampling.py", "/plan.py", "/outcome.py", "/value.py", "/limits.py"))
    ]
    assert not refused(early, "testbed.blocks", "testbed.policies", "testbed.core.sequence")
    of_a_sequence = [item for item in types_included("testbed.core") if item.file == "testbed/core/sequence.py"]
    assert {item.module for item in of_a_sequence if is_part_of(item, "testbed.blocks")} == {
        "testbed.blocks.kv_sequence.KVSequence"
    }


def in_circles(leads: dict[str, set[str]]) -> list[str]:
    """Those that lead back to themselves."""
    reached = {name: set(others) for name, others in leads.items()}
    for middle in sorted(reached):
        for name in sorted(reached):
            if middle in reached[name]:
                reached[name] |= reached[middle]
    return sorted(name for name in reached if name in reached[name])


@pytest.mark.parametrize("part", ["testbed", "sim", "real", "experiments", "analysis"])
def test_no_module_leads_back_to_itself(part: str) -> None:
    """Annotations included."""
    files = [relative(path) for path in FILES if path.is_relative_to(ROOT / part.replace(".", "/"))]
    leads: dict[str, set[str]] = {file: set() for file in files}
    for item in types_included(part):
        names = item.module.split(".")
        leads[item.file] |= {f"{'/'.join(names[:end])}.py" for end in range(1, len(names) + 1)} & set(files)
    assert sum(map(len, leads.values())) > 20, "nothing leads anywhere"
    assert in_circles(leads) == []


def test_the_rule_about_circles_sees_what_it_should() -> None:
    assert in_circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == ["b", "c", "d"]


OWNERS = {  # of what a sequence is: the class that writes it, once the sequence is made
    "num_tokens": "Sequence", "num_computed_tokens": "Sequence", "num_in_flight_tokens": "Sequence",
    "num_placeholders": "Sequence", "state": "Sequence", "siblings": "Sequence", "is_prefilling": "Running",
    "num_preemptions": "Preempting", "last_step": "Step", "finish_reason": "Scheduler", "chain": "Prefixes",
    "num_cached_tokens": "Prefixes", "cpu_table": "SwapSpace",
}  # fmt: skip


def test_each_state_of_a_sequence_has_one_writer() -> None:
    writers: dict[str, set[str]] = {name: set() for name in OWNERS}
    files = [path for path in FILES if path.parent in (ROOT / "testbed" / "core", ROOT / "testbed" / "blocks")]
    for one in [node for path in files for node in tree_of(path).body if isinstance(node, ast.ClassDef)]:
        methods = [
            node for node in one.body if isinstance(node, ast.FunctionDef) and node.name not in ("__init__", "fork")
        ]
        for node in [node for method in methods for node in ast.walk(method)]:
            is_written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in OWNERS
            if is_written and (ast.unparse(node.value) != "self" or one.name in ("Sequence", "KVSequence")):
                writers[node.attr].add(one.name)
    assert writers == {name: {owner} for name, owner in OWNERS.items()}


def test_no_policy_sees_the_true_length_of_an_output() -> None:
    """What a policy believes of the future comes from the configured oracle."""
    hidden = {"forced_output", "is_forced", "token_limit", "foreseen_end", "tokens", "output_token_ids"}
    files = [path for path in FILES if "policies" in path.parts and path.name != "oracle.py"]
    assert len(files) > 15
    seen = [
        f"{path.relative_to(ROOT)}:{node.lineno} reads .{node.attr}"
        for path in files
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in hidden
    ]
    assert not seen, seen


def test_traces_know_no_scheduler() -> None:
    traces = types_included("testbed.traces")
    assert not refused(traces, "testbed.core.scheduler", "testbed.core.serve", "testbed.core.sequence")


def test_the_simulator_runs_without_torch() -> None:
    assert not refused(imports_in("sim"), "torch", "triton", "transformers", "safetensors", "flash_attn")


def test_the_engine_runs_without_simpy() -> None:
    assert not refused(imports_in("real"), "simpy")


def test_no_arrow_runs_up() -> None:
    """Neither an import inside a function, nor one for type checkers, nor a name that leads to a module."""
    assert not [up for path in FILES for up in running_up(tree_of(path), path.relative_to(ROOT).as_posix())]


@pytest.mark.parametrize(
    ("file", "source", "is_bad"),
    [
        ("real/a.py", "def f():\n    from experiments.text import LLM", True),
        ("real/a.py", "if TYPE_CHECKING:\n    from experiments import text", True),
        ("real/a.py", "def f():\n    return importlib.import_module('experiments')", True),
        ("real/a.py", "import_module('.text', package='experiments')", True),
        ("real/a.py", "HOMES = {'LLM': 'experiments.text'}", True),
        ("real/a.py", "f'experiments.{name}'", True),
        ("real/a.py", "run([sys.executable, '-m', 'experiments'])", True),
        ("real/a.py", "import_module(name)", True),
        ("real/text/a.py", "from ...sim import driver", True),
        ("sim/a.py", "import real.driver", True),
        ("sim/a.py", "__import__('real')", True),
        ("analysis/a.py", "'sim.driver'", True),
        ("testbed/core/a.py", "def f():\n    import sim", True),
        ("experiments/a.py", "from real.text import llm\nimport_module(name)", False),
        ("real/a.py", "from testbed.errors import ConfigError\nimport_module('flash_attn')", False),
        ("real/a.py", "from .text import llm\n'real.parallel.worker'", False),
        ("analysis/a.py", "run.backend == 'real'", False),
        ("analysis/a.py", "'Runs into experiments. The others are named: real.'", False),
    ],
)
def test_the_rule_about_arrows_sees_what_it_should(file: str, source: str, is_bad: bool) -> None:
    assert bool(running_up(ast.parse(source), file)) is is_bad


def test_text_needs_no_torch() -> None:
    text = [item for item in imports_in("real") if item.file.startswith("real/text/")]
    assert len(text) > 50, "nothing was looked at"
    assert not refused(text, "torch", "triton")
    assert not [
        str(item) for item in text if item.top in ("transformers", "tokenizers") and not item.is_inside_function
    ]


def test_analysis_reads_records_and_knows_nothing_else_of_the_house() -> None:
    bad = [
        str(item)
        for item in imports_in("analysis")
        if item.top in (*ROOMS, "tests", "torch", "simpy", "hydra")
        and item.top != "analysis"
        and not is_part_of(
            item, "testbed.records.schema", "testbed.records.operators", "testbed.errors", "testbed.foreign_text",
            "testbed.output",
        )
    ]  # fmt: skip
    assert not bad


def test_hydra_stays_at_the_edge() -> None:
    for room in ("testbed", "sim", "real", "analysis"):
        assert not refused(imports_in(room), "hydra", "omegaconf")


def leads_nowhere(item: Import) -> bool:
    """Whether an import of this repository names neither a module nor something in one or in a package's file."""
    *packages, name = item.module.split(".")
    place = ROOT.joinpath(*packages)
    return not (place.with_suffix(".py").is_file() or (place / f"{name}.py").is_file() or (place / name).is_dir()) and (
        not (place / "__init__.py").is_file() or name not in (place / "__init__.py").read_text(encoding="utf-8")
    )


def test_every_import_of_our_own_leads_somewhere() -> None:
    """Also in tests, which no type checker reads, and inside functions."""
    files = [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]
    own = [item for path in files for item in imports_of(path) if item.top in FLOORS and item.module != item.top]
    assert len(own) > 5000, "nothing was looked at"
    assert not [str(item) for item in own if leads_nowhere(item)]
    assert leads_nowhere(Import("a.py", 1, "experiments.costs.build_cost", False))


def test_every_package_has_its_page() -> None:
    """A file that exists, also on a fresh clone, and says what the package is."""
    packages = {path.parent for path in FILES if "plugins" not in path.parts}
    assert not [relative(place) for place in packages if not (place / "__init__.py").is_file()]
    assert not [relative(place) for place in packages if not ast.get_docstring(tree_of(place / "__init__.py"))]


# --- the rooms of analysis and experiments ---

# packages, and modules beside them, each of which is built on those before it alone
BUILT_ON = {
    "analysis": (
        "format", "naming", "progress", "reading", "measures", "describe", "load", "comparison", "explain",
        "plots", "timelines", "reports",
    ),
    "experiments": (
        "console", "configuration", "fits", "tables", "wiring", "conform", "runs", "api", "llm_settings", "text",
        "observe", "sweeps", "commands", "calibration", "capacity", "fidelity", "demo", "serving", "bench", "cli",
    ),
}  # fmt: skip


def against_the_order(item: Import, order: tuple[str, ...]) -> bool:
    """Whether an import leads to a part behind its own; what a function imports when it is called is no matter."""
    file, module = item.file.removesuffix(".py").split("/"), item.module.split(".")
    parts = [names[1] for names in (file, module) if names[0] == file[0] and len(names) > 1 and names[1] in order]
    return len(parts) == 2 and not item.is_inside_function and order.index(parts[1]) > order.index(parts[0])


@pytest.mark.parametrize("room", BUILT_ON)
def test_the_parts_of_a_room_are_built_on_one_another(room: str) -> None:
    order, inside = BUILT_ON[room], ROOT / room
    found = {path.relative_to(inside).parts[0].removesuffix(".py") for path in FILES if path.is_relative_to(inside)}
    assert found - {"__init__", "__main__", "conf", "plugins"} == set(order), "a part that has no place in the order"
    assert not [str(item) for item in imports_in(room) if against_the_order(item, order)]


@pytest.mark.parametrize(
    ("file", "source", "is_bad"),
    [
        ("analysis/measures/a.py", "from analysis.reports.tables import Cell", True),
        ("analysis/measures/a.py", "from analysis import load", True),
        ("analysis/load.py", "from analysis.measures.summary import summarise", False),
        ("analysis/measures/a.py", "def f():\n    from analysis.reports import report", False),
        ("analysis/measures/a.py", "from analysis.measures import b", False),
    ],
)
def test_the_rule_about_parts_sees_what_it_should(file: str, source: str, is_bad: bool) -> None:
    imports = imports_in_tree(ast.parse(source), file)
    assert any(against_the_order(item, BUILT_ON["analysis"]) for item in imports) is is_bad


# --- what others see of it ---


@pytest.mark.parametrize("room", ROOMS)
def test_type_checkers_of_others_read_the_types(room: str) -> None:
    """Without the marker, each import from an installed testbed is Any to them."""
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (ROOT / room / "py.typed").exists()
    assert shipped["*"] == ["py.typed"]


# --- what is really loaded ---


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        (
            "import testbed.core.scheduler, testbed.core.serve, testbed.records.recorder, testbed.records.tape; "
            "import testbed.policies.compositions.unified",
            ("numpy", "torch", "simpy", "pyarrow", "pandas", "hydra", "scipy", "sim", "real"),
        ),
        ("import testbed.traces.inbox", ("torch", "simpy", "pyarrow", "pandas", "hydra", "sim", "real")),
        (
            "import real, real.text.generate; real.SamplingParams, real.text.llm.LLM",
            ("torch", "transformers", "simpy", "hydra", "experiments"),
        ),
        ("import sim.driver, sim.backend", ("torch", "transformers", "triton", "hydra", "real")),
        ("import real.parallel.worker, real.parallel.wire", ("torch", "numpy", "simpy", "hydra", "sim", "experiments")),
    ],
)
def test_a_process_loads_no_more_than_it_may(program: str, absent: tuple[str, ...]) -> None:
    code = f"import sys; {program}; print(*sorted(m for m in {absent!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
