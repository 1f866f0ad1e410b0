"""What the documents name is there: modules, classes, files, links. And what they show is what happens."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest

from experiments.configuration.compose import compose_config
from experiments.configuration.options import options
from experiments.configuration.policies import POLICIES
from testbed.core.sampling import SamplingParams
from testbed.traces.transforms import TRANSFORMS
from tests.experiments.kit import Say, decisions_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = "testbed|sim|real|experiments|analysis"
METADATA = ("testbed.profile", "testbed.operators")  # keys of files, and no modules
PAGE = {"ids": lambda page: page.stem, "argnames": "page"}


@pytest.mark.parametrize(argvalues=PAGES, **PAGE)
def test_every_name_that_a_page_imports_or_quotes_is_there(page: Path) -> None:
    for name in re.findall(rf"(?<![\w./])(?:{ROOMS})(?:\.[A-Za-z_]\w*)+", page.read_text()):
        if name not in METADATA and not name.endswith(".py"):
            assert find(name.split(".")), name


def find(parts: list[str]) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError as error:
            if error.name in ("torch", "triton"):
                pytest.skip(f"needs {error.name}")
            continue
        for part in parts[length:]:
            try:
                found = getattr(found, part)
            except AttributeError:
                return False
            except ModuleNotFoundError as error:  # a class that is loaded when vLLM asks for it
                return error.name == "vllm"
        return True
    return False


@pytest.mark.parametrize(argvalues=PAGES, **PAGE)
def test_every_file_that_a_page_names_or_links_is_there(page: Path) -> None:
    text = page.read_text()
    for file in re.findall(rf"`((?:{ROOMS}|tests|docs)/[\w/.-]+)`", text):
        if not file.startswith("testbed/_compiled"):
            assert (ROOT / file).exists(), file
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text):
        file = page.parent / link if link else page
        assert file.exists(), link
        assert not anchor or anchor in map(anchor_of, re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)), anchor


def anchor_of(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_every_page_of_results_is_linked_from_a_page() -> None:
    results = {page.name: page.read_text() for page in (ROOT / "docs" / "results").glob("*.md")}
    for name in results:
        texts = [*(page.read_text() for page in PAGES), *(text for other, text in results.items() if other != name)]
        assert any(f"{name})" in text or f"{name}#" in text for text in texts), name


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("traces", [*options("trace"), *TRANSFORMS]),
        ("cost-models", options("cost")),
        ("simulator", POLICIES["backend.router"]),
        ("sampling", [field.name for field in fields(SamplingParams)]),
    ],
)
def test_a_page_names_all_that_can_be_chosen_there(page: str, names: Iterable[str]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert [name for name in names if f"`{name}`" not in text] == []


# --- README.md ---


@pytest.mark.usefixtures("unrendered")
def test_the_comparison_in_the_readme_has_the_result_that_is_quoted(
    here: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [entry for entry in sys.path if entry not in ("", str(ROOT))]
    monkeypatch.setattr(sys, "path", [*others, str(here), str(ROOT)])  # the repository may have a mine.py, too
    policy, commands, script = (block for block in shown("../README.md") if "shortest_prompt_first" in block)
    (here / "mine.py").write_text(policy)
    for command in commands.replace("\\\n", "").splitlines()[1:]:
        say(*shlex.split(command)[1:]).success()
    report = (here / "sweeps" / "mine.md").read_text().replace("\xa0", " ")
    quoted = re.search(r"\n> - (.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert quoted
    for part in re.split(r"\n- ", quoted[1].replace("\n> -", "\n-").replace("\n>  ", "")):
        assert part in report
    with redirect_stdout(StringIO()) as said:
        exec(script, {})
    assert said.getvalue().split() == script.rpartition("# ")[2].replace(",", "").split()


# --- docs/vllm.md ---


def test_the_model_without_weights_that_is_shown_can_be_run_and_priced(tmp_path: Path) -> None:
    (config,) = (block for block in shown("vllm.md") if block.startswith("{"))
    (tmp_path / "config.json").write_text(config)
    model = compose_config(["backend=vllm", f"model.path={tmp_path}", "backend.load_format=dummy"]).model
    assert (model.architecture, model.num_hidden_layers, model.dtype) == ("Qwen3ForCausalLM", 4, "float32")


# --- docs/life-of-a-request.md ---


def shown(page: str) -> Iterator[str]:
    """The blocks of code of a page."""
    return (block for block in re.findall(r"```\w*\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL))


def test_the_preemption_that_is_shown_happens_so(here: Path, say: Say) -> None:
    rows, command = (block for block in shown("life-of-a-request.md") if "two.jsonl" in block or "request_id" in block)
    (here / "two.jsonl").write_text(rows)
    say(*command.split()[1:]).success()
    steps = decisions_of(here / "run")
    assert steps[0]["scheduled"] == {"a": 30, "b": 30}
    both = {"a": 1, "b": 1}
    assert [steps[number]["free_blocks"] for number in (0, 2, 3, 18, 19, 34)] == [4, 4, 2, 2, 0, 0]
    assert all(steps[number]["scheduled"] == both for number in range(1, 35))
    assert [step["step"] for step in steps if step["preempted"]] == [35]
    assert steps[35]["preempted"] == ["b"]
    assert all(steps[number]["scheduled"] == {"a": 1} for number in range(35, 40))
    assert [step["free_blocks"] for step in steps[35:41]] == [3] * 6
    assert steps[40]["scheduled"] == {"b": 17}
    assert steps[40]["cached_tokens"] == {"b": 48}
    assert (len(steps), steps[44]["scheduled"]) == (45, {"b": 1})
