"""Outputs of `testbed fidelity`: its folder, whole or not there, and the marked part of a document."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from tempfile import mkdtemp

from experiments.configuration.saved import is_copy, read_manifest
from experiments.console import as_markdown
from experiments.runs.environment import describe_machine, describe_versions
from experiments.runs.interrupt import undisturbed
from experiments.runs.run_folder import alone, refuse_existing
from testbed.errors import ConfigError, RunFolderError
from testbed.output import written

RESULT, TEXT, FIGURE, RUNS, FITTED = "fidelity.json", "fidelity.md", "fidelity", "runs", "fitted"
_FILES = (RESULT, TEXT, f"{FIGURE}.png", f"{FIGURE}.svg")
_SIMULATED = ("simulated", "fitted")
_COMMAND = "testbed fidelity "
BEGIN, END = "<!-- testbed fidelity: begin -->", "<!-- testbed fidelity: end -->"


def refuse_inside(inputs: Sequence[Path], runs: Path) -> None:
    """Raises ConfigError if a measured run is in the folder `runs`, in which --overwrite removes runs, or if `runs` is
    in a measured folder, whose next comparison would take them for measured ones."""
    for path in inputs:
        if path.resolve().is_relative_to(runs.resolve()):
            raise ConfigError(f"{path} lies in {runs}, which --overwrite renews; choose another --out")
        if path.is_dir() and runs.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"--out {runs.parent} lies in {path}, which is compared; choose a folder beside it")


@contextmanager
def renewed(out: Path, *, overwrite: bool) -> Iterator[None]:
    """Context in which a command writes its outputs into `out`, in place of those of an earlier command. If it does not
    complete, its own are removed and the earlier ones are there again (or beside it, in a hidden folder, if they cannot
    be moved back); nothing else is touched. Raises RunFolderError if another process writes there, or has done so since
    without being asked to `overwrite`."""
    out = out.resolve()  # the lock lies beside it, however it is spelled
    if not out.name:
        raise ConfigError(f"--out {out} cannot be made anew; choose a folder in it")
    with _new_folders(out), alone(out.with_name(f".{out.name}.lock"), out):
        refuse_existing(out, overwrite)
        earlier = list(_earlier(out))
        aside = Path(mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        others: set[Path] | None = None
        try:
            _move(earlier, out, aside)
            others = set(_written(out))
            yield
        except BaseException:
            with undisturbed():
                own = set() if others is None else set(_written(out)) - others
                for path in sorted(own, reverse=True):  # what is in a folder before the folder
                    path.rmdir() if path.is_dir() else path.unlink()
                moved = [aside / path.relative_to(out) for path in earlier]
                try:
                    _move([path for path in moved if path.exists()], aside, out)
                except OSError as error:
                    why = error.strerror or error
                    raise RunFolderError(f"{out}: its earlier outputs are in {aside}; move them back ({why})") from None
                shutil.rmtree(aside)
            raise
        shutil.rmtree(aside)


@contextmanager
def _new_folders(out: Path) -> Iterator[None]:
    """Context that makes the folder of `out`. If it fails, no empty folder is left that was not there before."""
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in new:
            with suppress(OSError):  # there is something else in it
                folder.rmdir()
        raise


def _move(paths: Sequence[Path], source: Path, target: Path) -> None:
    for path in paths:
        new = target / path.relative_to(source)
        new.parent.mkdir(parents=True, exist_ok=True)
        path.rename(new)
        if path.parent != source and not any(path.parent.iterdir()):  # the folder of a load
            path.parent.rmdir()


def _written(out: Path) -> Iterator[Path]:
    """Yields what is at the places of outputs."""
    for path in (out / name for name in (*_FILES, RUNS, FITTED)):
        yield from (path, *path.rglob("*")) if path.exists() else ()


def _earlier(out: Path) -> Iterator[Path]:
    """Yields the files and run folders, `<runs>/<load>/{measured,simulated,fitted}`, that earlier commands wrote."""
    yield from (out / name for name in _FILES if (out / name).exists())
    for load in sorted(path for runs in (out / RUNS, out / FITTED) for path in runs.glob("*") if path.is_dir()):
        for folder in (load / "measured", *(load / name for name in _SIMULATED)):
            if not load.is_symlink() and not folder.is_symlink() and _is_ours(folder):
                yield folder


def _is_ours(folder: Path) -> bool:
    if folder.name not in _SIMULATED:
        return is_copy(folder)
    return str(read_manifest(folder).get("command", "")).startswith(_COMMAND)


def check_page(page: Path | None) -> None:
    """Raises ConfigError if the document does not exist or lacks the marks for the result."""
    if page is None:
        return
    if not page.is_file():
        raise ConfigError(f"--page {page}: no such file; expected a document with the marks {BEGIN} and {END}")
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"--page {page}: expected the marks {BEGIN} and {END} once each, in this order")


def write_page(page: Path, arguments: Sequence[str], lines: Sequence[str]) -> None:
    """Replaces the text between the marks. arguments: of the command; its files are named without their folders."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    words = [Path(word).name if Path(word).exists() and word != str(page) else word for word in arguments]
    machine = describe_machine()
    head = [
        f"`{shlex.join(['testbed', 'fidelity', *words])}`, {date.today().isoformat()}, {machine.get('cpu')}, testbed "
        f"{describe_versions()['llm-serving-testbed']}:",
        "",
    ]
    with written(page.resolve()) as file:  # a link stays one
        file.write("\n".join([before + BEGIN, *head, as_markdown(lines), END]) + after)
