"""Status lines and the progress bar say what a count of the same steps says."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from experiments.text import LLM
from real.text.prompts import read_prompts
from real.text.status import StatusLine, ThroughputBar
from testbed.core.commands import Recorder, StepView
from tests.experiments.kit import SHORT, TINY, say
from tests.text.kit import PROMPTS, ROOMY, greedy

LINE = re.compile(
    r"prompt ([\d,.]+) tok/s, generation ([\d,.]+) tok/s; running (\d+), waiting (\d+), swapped (\d+); "
    r"KV blocks in use: GPU ([\d.]+)%, CPU (none|[\d.]+%); prefix hits (-|[\d.]+%)"
)


class Seen(Recorder):
    """Counts the steps of a run by itself."""

    def __init__(self) -> None:
        self.steps: list[StepView] = []
        self.num_prompt = self.num_generated = 0

    def committed(self, step: StepView) -> None:
        self.steps.append(step)
        self.num_prompt += step.plan.shape.num_prefill_tokens
        self.num_generated += len(step.emitters)


def test_a_line_has_rates_queues_memory_and_hits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("real.text.llm._say", lines.append)
    llm, seen = LLM(folder, **ROOMY, status_s=1e-9), Seen()  # a line for each step
    inner = llm._engine.serve
    llm._engine.serve = lambda *args, watchers, **more: inner(*args, watchers=[*watchers, seen], **more)
    llm.generate([PROMPTS[0]], greedy(5))
    num_first = llm.scheduler.num_steps
    llm.generate([PROMPTS[0] + PROMPTS[0]], greedy(2))
    assert len(lines) == len(seen.steps) == llm.scheduler.num_steps
    prompt, generated = 0.0, 0.0
    for line, step in zip(lines, seen.steps, strict=True):
        match = LINE.fullmatch(line)
        assert match, line
        rates = [float(text.replace(",", "")) for text in match.groups()[:2]]
        counts = [int(text) for text in match.groups()[2:5]]
        assert counts == [step.num_running, step.num_waiting, step.num_swapped]
        assert float(match[6]) == pytest.approx(100 * (1 - step.free_gpu_blocks / 256), abs=0.051)
        assert match[7] == "none"
        span_s = (step.end_ns - step.plan_ns) / 1e9
        prompt, generated = prompt + rates[0] * span_s, generated + rates[1] * span_s
    # a line's time begins where the one before ended: a little earlier than the plan
    assert prompt == pytest.approx(seen.num_prompt, rel=0.2)
    assert generated == pytest.approx(seen.num_generated, rel=0.2)
    hits = [LINE.fullmatch(line)[8] for line in lines]
    (num,) = {len(ids) for ids in map(llm.tokenizer.encode, PROMPTS[:1])}
    assert hits[:2] == ["0.0%", "-"]
    assert hits[num_first] == f"{num // 4 * 4 / len(llm.tokenizer.encode(PROMPTS[0] * 2)):.1%}"  # whole blocks of 4


def test_a_bar_of_a_terminal_shows_rates_and_a_pipe_sees_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folder, **ROOMY)
    llm.generate(PROMPTS, greedy(30))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("real.text.status.BAR_INTERVAL_NS", 0)
    steps, terminal = steps_of(llm), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    bar = ThroughputBar(4)
    for step in steps:
        bar.committed(step)
    assert re.fullmatch(r"prefill [\d,]+ tok/s, decode [\d,]+ tok/s", bar._bar.postfix)
    bar.ended([], 0)
    bar.close()


def steps_of(llm: LLM) -> list[StepView]:
    seen = Seen()
    for _ in llm._serve(llm._requests(read_prompts(PROMPTS, llm.tokenizer), greedy(4)), False, [seen]):
        pass
    return seen.steps


def test_runs_have_status_lines_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    slow = ("cost=constant", "cost.step_s=0.5", "record.status_s=1", f"hydra.run.dir={folder}")
    said = say(capsys, "run", *TINY, *SHORT, *slow)
    assert said.status == 0
    lines = [line for line in said.lines if LINE.fullmatch(line)]
    assert lines
    log = (folder / "run.log").read_text()
    assert all(f"status: {line}" in log for line in lines)
    assert "record.status_s is 0" in say(capsys, "run", *TINY, "record.status_s=0").error()


def test_a_line_comes_only_when_its_time_is_over(llm: LLM) -> None:
    lines: list[str] = []
    for interval_s, few in ((1e-9, False), (3600.0, True)):
        lines.clear()
        watcher = StatusLine(interval_s, llm.scheduler.blocks, lines.append)
        for _ in llm._serve(llm._requests(read_prompts(PROMPTS, llm.tokenizer), greedy(4)), False, [watcher]):
            pass
        assert (lines == []) is few
