"""A long Python session, as a notebook: classes are of cells or of files that are edited, and runs are interrupted."""

from __future__ import annotations

import importlib
import linecache
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from analysis.reports.report import report_from_folders
from experiments import api, find_capacity, replay, simulate
from experiments.capacity import study
from experiments.configuration import compose
from experiments.configuration.compose import _composed
from experiments.configuration.own_class import imported
from experiments.runs import run as runs
from experiments.runs.identity import _of_path as hash_of
from experiments.runs.interrupt import undisturbed
from testbed.errors import ConfigError, RunFolderError
from tests.experiments.capacity_kit import BUSY

MINE = """\
class Cap:
    def allows(self, seq, running):
        return len(running) < 2
"""
TRACE = [{"arrival_time": 0, "prompt_tokens": 8, "output_tokens": 4} for _ in range(6)]
Cell = Callable[[str], None]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """Runs the text of a cell as IPython does: in a `__main__` without a file, its lines in `linecache`."""
    main, numbers = ModuleType("__main__"), count(1)
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(text: str) -> None:
        file = f"/tmp/ipykernel_{os.getpid()}/{next(numbers)}.py"
        monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(keepends=True), file))
        exec(compile(text, file, "exec"), vars(main))

    return run


def made_with(admission: str, **settings: Any) -> dict[str, str]:
    run = simulate(TRACE, scheduler={"admission": {"_target_": admission}}, **settings)
    return dict(run.manifest["identity"]["classes"])


def rewrite(home: Path, num: int) -> None:
    text = MINE.replace("2", str(num))
    (home / "mine.py").write_text(f"{text}# {num}{' ' * num}\n")  # another size: byte code goes by it


def test_a_class_of_a_cell_is_known_by_its_source_and_by_what_it_names(cell: Cell, tmp_path: Path) -> None:
    of_main = "def most():\n    for _ in ():\n        pass\n    return MAX\n\n\nMAX = 2\n"
    cell(of_main + MINE.replace("2", "most()"))
    first = made_with("__main__.Cap", folder=tmp_path / "run")
    page = report_from_folders([tmp_path / "run"], tmp_path / "report.html")
    assert f"__main__.Cap(), file {first['__main__.Cap'][:8]}" in page.read_text()
    assert made_with("__main__.Cap") == first
    cell("MAX = 3")
    assert made_with("__main__.Cap") != first
    cell(of_main)
    assert made_with("__main__.Cap") == first
    cell("_ = 'shown'")
    assert made_with("__main__.Cap") == first, "a cell's output, which it does not read"
    cell(MINE.replace("2", "2 + most()"))
    assert made_with("__main__.Cap") != first


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("MAX = [2]\n" + MINE.replace("2", "MAX[0]"), "MAX = [3]"),
        ("MAX = {'a': 2}\n" + MINE.replace("2", "MAX['a']"), "MAX = {'a': 3}"),
        ("A, B, C = 2, 3, 3\n" + MINE.replace("2", "A * B + C"), "A, B, C = 2, 3, 2"),
        (f"def of(n):\n    return lambda made: made\n\n\n@of(2)\n{MINE}", f"@of(3)\n{MINE}"),
        (MINE.replace("    def", "    @staticmethod\n    def").replace("self, ", ""), None),
    ],
)
def test_whatever_a_class_of_a_cell_is_made_of_tells_it_from_another(cell: Cell, text: str, other: str | None) -> None:
    cell(text)
    first = made_with("__main__.Cap")
    cell(text.replace("2", "3") if other is None else other)
    assert made_with("__main__.Cap") != first


def test_a_text_that_names_what_no_scheduler_knows_is_no_foresight(cell: Cell) -> None:
    cell(f"SAID = 'not by request.forced_output'\n{MINE.replace('2', 'len(SAID)')}")
    made_with("__main__.Cap")


def test_a_class_of_a_cell_that_knows_the_future_is_refused_and_one_beside_it_is_not(cell: Cell) -> None:
    cell(
        MINE + "\n\nclass Seer:\n    def allows(self, seq, running):\n        return bool(seq.request.forced_output)\n"
    )
    with pytest.raises(ConfigError, match=r"^scheduler.admission: __main__.Seer reads forced_output"):
        made_with("__main__.Seer")
    made_with("__main__.Cap")


def test_a_class_of_a_script_is_known_by_its_file(cell: Cell, home: Path) -> None:
    cell(MINE)
    vars(sys.modules["__main__"])["__file__"] = str(home / "mine.py")
    assert made_with("__main__.Cap") == {"__main__": made_with("mine.Cap")["mine"]}


def test_a_search_does_not_go_on_with_another_class_of_that_name(cell: Cell, tmp_path: Path) -> None:
    search = [item for item in BUSY if not item.startswith("scheduler")]
    search += ["slo.ttft_s=0.2", "scheduler.admission={_target_: __main__.Cap}"]
    cell(MINE)
    find_capacity(*search, folder=tmp_path, tolerance=0.5)
    cell(MINE.replace("2", "200"))
    with pytest.raises(RunFolderError, match=r"the class file __main__/Cap.py changed"):
        find_capacity(*search, folder=tmp_path, tolerance=0.5)


def test_other_processes_say_that_they_lack_the_classes_of_a_cell(cell: Cell) -> None:
    with pytest.raises(ConfigError, match=r"defines is in no other process; put it in a file, as mine.Cap$"):
        made_with("__main__.Cap")


def test_a_run_is_of_the_file_as_it_was_imported_and_says_that_it_has_changed(home: Path) -> None:
    before = made_with("mine.Cap")
    rewrite(home, 3)
    with pytest.warns(RuntimeWarning, match=r"mine\.py has changed since it was imported.*reload.*imports from it$"):
        assert made_with("mine.Cap") == before
    rewrite(home, 4)
    with pytest.warns(RuntimeWarning, match=rf"changed since it was imported \(to {hash_of(home / 'mine.py')[:8]}\)"):
        made_with("mine.Cap")  # another text: Python shows one of them once
    importlib.reload(sys.modules["mine"])
    assert made_with("mine.Cap") != before


def test_a_module_from_elsewhere_does_not_take_the_place_of_ones_own(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", ["/bin", str(elsewhere), *sys.path])
    said = rf"^scheduler.admission: 'mine' is a module that is there already \({elsewhere}/mine.py\), and comes first; "
    with pytest.raises(ConfigError, match=said):
        made_with("mine.Cap")
    with pytest.raises(ConfigError, match="comes first"):
        imported("victim", "mine.Cap")
    monkeypatch.setattr(sys, "path", sys.path[1:])
    made_with("mine.Cap")  # beside the script that runs


def test_a_search_is_of_the_file_as_it_is_in_this_process_and_in_those_that_it_starts(home: Path) -> None:
    search = [item for item in BUSY if not item.startswith("scheduler")]
    search += ["cache.num_gpu_blocks=900", "slo.ttft_s=0.2", "seed=0,1", "scheduler.admission={_target_: mine.Cap}"]
    few = find_capacity(*search, folder="few", tolerance=0.5, jobs=2).found[0].capacity
    rewrite(home, 200)
    with pytest.raises(ConfigError, match=r"mine\.py has changed since it was imported"):
        find_capacity(*search, folder="many", tolerance=0.5, jobs=2)
    importlib.reload(sys.modules["mine"])
    many = find_capacity(*search, folder="many", tolerance=0.5, jobs=2).found[0].capacity
    assert few is not None
    assert many is not None
    assert many > 2 * few, "a worker of the first search has the old class"


def watched(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[int]:
    """How many threads were in the `_run` of the module, each time that one came."""
    running, at_once, inside = vars(module)["_run"], [], set()

    def run(*given: Any) -> Any:
        inside.add(threading.get_ident())
        at_once.append(len(inside))
        time.sleep(0.01)
        try:
            return running(*given)
        finally:
            inside.remove(threading.get_ident())

    monkeypatch.setattr(module, "_run", run)
    return at_once


def test_threads_that_search_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A search ends the workers of the one before."""
    _composed.cache_clear()
    search = [item for item in BUSY if not item.startswith("scheduler")]
    at_once = watched(monkeypatch, study)

    def found(name: str) -> float | None:
        words = (*search, "slo.ttft_s=0.2", f"scheduler={name}")
        return find_capacity(*words, folder=tmp_path / name, tolerance=0.5).found[0].capacity

    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert None not in list(pool.map(found, ("vllm_v1", "vllm_v0", "orca")))
    finally:
        sys.setswitchinterval(often)
    assert at_once == [1, 1, 1]


def test_replays_and_simulations_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_run", lambda *given: None)
    at_once = watched(monkeypatch, api)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda call: call(TRACE), (simulate, replay) * 2))
    assert at_once == [1, 1, 1, 1]


def test_an_interrupt_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What catches errors of single runs in a loop goes on to the next; Ctrl-C ends the loop."""
    closing = runs.engines.RunRecords.close

    def pressed(self: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        closing(self)

    monkeypatch.setattr(runs.engines.RunRecords, "close", pressed)
    monkeypatch.setattr(api, "_TEMPORARY", set())
    for folder in (tmp_path / "run", None):
        with pytest.raises(KeyboardInterrupt):
            simulate(TRACE, folder=folder)
    assert len(api._TEMPORARY) == 1, "of a complete run nothing is kept that no message names"
    for made in api._TEMPORARY:
        shutil.rmtree(made)
    monkeypatch.undo()
    with undisturbed():
        signal.raise_signal(signal.SIGINT)
    assert simulate(TRACE).is_complete, "it came late in an earlier call"


def test_what_is_kept_of_a_run_without_a_folder_is_where_its_message_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_TEMPORARY", set())  # without those of other tests
    done = simulate(TRACE).path
    monkeypatch.setattr(runs, "_drive", lambda *_: KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match="partial results kept in ") as told:
        simulate(TRACE)
    kept = Path(str(told.value).rpartition(" kept in ")[2])
    api._delete_temporary()  # as when Python exits
    assert not done.exists()
    assert (kept / "requests.parquet").exists()
    shutil.rmtree(kept.parent)


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    _composed.cache_clear()
    monkeypatch.setattr(compose, "_PARTS", {})
    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    presets = ["vllm_v1", "vllm_v0", "orca", "sarathi", "static", "lightllm", "vtc", "nano_vllm"]
    try:
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda name: simulate(TRACE, scheduler=name).manifest["scheduler"], presets))
    finally:
        sys.setswitchinterval(often)
    assert made == presets
