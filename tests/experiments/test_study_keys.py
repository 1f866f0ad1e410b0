"""Question, SLO, baseline and margin belong to the configuration: the summary and the report have them from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.load import load_run
from tests.experiments.kit import SHORT, TINY, Say, latest

SLO = ("slo.ttft_s=0.5", "slo.tpot_s=1e-9")


def test_a_run_is_judged_by_its_own_slo(tmp_path: Path, say: Say) -> None:
    said = say("run", *TINY, *SHORT, *SLO, f"hydra.run.dir={tmp_path / 'run'}")
    assert "SLO          kept by 0.00% of requests, goodput 0 req/s" in said.out
    run = load_run(tmp_path / "run")
    assert run.summary["slo"]["attainment"] == 0
    assert run.slo is not None
    assert (run.slo.ttft_s, run.slo.tpot_s, run.slo.e2e_s) == (0.5, 1e-9, None)
    say("run", f"from={tmp_path / 'run'}", "slo.tpot_s=1", f"hydra.run.dir={tmp_path / 'b'}").success()
    assert load_run(tmp_path / "b").summary["slo"]["attainment"] == 1
    assert load_run(tmp_path / "b").manifest["digest"] == run.manifest["digest"], "an SLO decides nothing"


def test_a_class_is_judged_by_its_own_slo(tmp_path: Path, say: Say) -> None:
    labels = "trace.transforms=[{name: label, classes: [{tenant: chat}, {tenant: batch}]}]"
    run = ("run", *TINY, *SHORT, "trace.num_requests=30", labels, "slo.ttft_s=1e-9", f"hydra.run.dir={tmp_path / 'a'}")
    said = say(*run, "slo.classes=[{tenant: batch, ttft_s: 9}]")
    found = load_run(tmp_path / "a")
    num_batch = (found.requests["tenant"] == "batch").sum()
    assert 0 < found.summary["slo"]["num_met"] == num_batch < 30
    assert f"SLO          kept by {num_batch / 30:.2%} of requests" in said.out
    assert str(found.slo).endswith("; tenant batch: TTFT ≤ 9.00\xa0s")


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ("[{tenant: b}]", "slo.classes[0] is {'tenant': 'b'}; it must be a mapping with a tenant, a priority or both"),
        ("[{ttft_s: 1}]", "slo.classes[0] is {'ttft_s': 1}; it must be a mapping with a tenant, a priority or both"),
        ("[{tenant: b, ttft_s: 1}, 3]", "slo.classes[1] is 3; it must be a mapping with a tenant"),
        ("[{tenant: b, ttft: 1}]", "a key of slo.classes[0] is 'ttft'; did you mean 'ttft_s'?"),
        ("[{tenant: b, ttft_s: -1}]", "slo.classes[0].ttft_s is -1; it must be above 0 s, or null (no limit)"),
        ("[{tenant: b, ttft_s: x}]", "slo.classes[0].ttft_s is 'x'; it must be a number or null"),
        ("[{tenant: 5, ttft_s: 1}]", "slo.classes[0].tenant is 5; it must be a string or null"),
        ("[{tenant: ' ', ttft_s: 1}]", "slo.classes[0].tenant is ' '; it must be not empty"),
        ("[{priority: 1.5, ttft_s: 1}]", "slo.classes[0].priority is 1.5; it must be a whole number or null"),
        ("[{tenant: b, itl_max_s: 1}] record.token_times=false", "with record.token_times=false no gap between"),
    ],
)
def test_a_class_that_cannot_be_judged_is_told_in_one_line(tmp_path: Path, say: Say, classes: str, said: str) -> None:
    value, *more = classes.split("] ")
    given = f"slo.classes={value}{']' * bool(more)}"
    assert said in say("run", *TINY, *SHORT, given, *more, f"hydra.run.dir={tmp_path / 'a'}").error()


@pytest.mark.usefixtures("unrendered")
def test_the_report_has_what_the_runs_state(tmp_path: Path, say: Say) -> None:
    study = ("report.question='Is the second one faster?'", "report.baseline=prefill_first", "report.margin=0.05")
    load = latest(*TINY, *SHORT, "trace.num_requests=40", "seed=0,1,2")  # some within the margin, none identical
    sweep = ("-m", *load, "scheduler=vllm_v1,prefill_first", f"hydra.sweep.dir={tmp_path / 's'}")
    say("run", *sweep, *SLO, *study).success()
    say("report", str(tmp_path / "s"), "--out", str(tmp_path / "r.html")).success()
    text = (tmp_path / "r.md").read_text()
    assert "Is the second one faster?" in text
    assert "vllm_v1 against prefill_first" in text
    assert "TTFT ≤ 500" in text
    assert "±5" in text
    given = ("--question", "Another?", "--slo", "e2e_s=9", "--margin", "0.1", "--baseline", "vllm_v1")
    say("report", str(tmp_path / "s"), "--out", str(tmp_path / "q.html"), *given).success()
    text = (tmp_path / "q.md").read_text()
    assert "Another?" in text
    assert "prefill_first against vllm_v1" in text
    assert "≤ 9" in text
    assert "±10" in text


@pytest.mark.usefixtures("unrendered")
def test_windows_are_loads_until_the_sweep_states_that_they_are_replicates(tmp_path: Path, say: Say) -> None:
    windows = "trace.transforms=[{name: window, end_s: 0.2}],[{name: window, start_s: 0.2, end_s: 0.4}]"
    arms = ("trace.num_requests=160", "scheduler=vllm_v1,sarathi")
    stated, hint = "report.replicates=[trace.transforms]", "The loads are windows of one trace. If they are replicates"

    def told(transforms: str, place: str, *more: str) -> str:
        folder = tmp_path / place
        said = say("run", "-m", *TINY, *SHORT, *arms, transforms, f"hydra.sweep.dir={folder}", *more).success()
        assert ("restated     4 of them" in said) == bool(more)
        out = tmp_path / f"{place}{len(more)}.html"
        say("report", str(folder), "--out", str(out)).success()
        return out.with_suffix(".md").read_text()

    assert hint in told(windows, "s")
    assert hint not in told(windows, "s", stated)
    assert hint not in told(windows.replace("start_s: 0.2, end_s: 0.4", "end_s: 0.3"), "nested")
    faster = f"{windows[:-1]},{{name: scale_rate, factor: 4}}]"
    assert hint not in told(faster, "faster")
    assert "What report.replicates calls replicates was offered" in told(faster, "faster", stated)
    again = ("run", "-m", *TINY, *SHORT, *arms, windows, "report.replicates=[trace.seed]", "seed=5")
    say(*again, f"hydra.sweep.dir={tmp_path / 't'}").success()
    said = say("report", str(tmp_path / "s"), str(tmp_path / "t"), "--out", str(tmp_path / "b.html"))
    assert "run their sweeps' commands again with one of them, which" in said.error()


@pytest.mark.usefixtures("unrendered")
def test_runs_that_state_different_things_are_not_mixed_in_silence(tmp_path: Path, say: Say) -> None:
    sweep = ("-m", *TINY, *SHORT, "scheduler=vllm_v1,sarathi")
    for limit in (1, 2):
        where = f"hydra.sweep.dir={tmp_path / 's' / str(limit)}"
        say("run", *sweep, f"slo.ttft_s={limit}", where).success()
    report = ("report", str(tmp_path / "s"), "--out", str(tmp_path / "r.html"))
    assert "the runs state 2 different SLOs" in say(*report).error()
    say(*report, "--slo", "ttft_s=1", "--slo", "tpot_s=2").success()
    assert "TTFT ≤ 1.00 s and TPOT ≤ 2.00 s" in (tmp_path / "r.md").read_text().replace("\u00a0", " "), (
        "each --slo counts"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("slo.ttft_s=0", "slo.ttft_s is 0.0; it must be above 0 s"),
        ("slo.attainment=1", "slo.attainment is 1.0; it must be above 0 and below 1"),
        ("slo.tttf_s=1", "did you mean 'slo.ttft_s'"),
        ("report.margin=2", "report.margin is 2.0; it must be above 0 and below 1"),
        ("report.replicates=[trace.transfoms]", "which this trace has not; did you mean 'trace.transforms'?"),
        ("report.replicates=[trace.prompt.valu]", "did you mean 'trace.prompt.value'?"),
        ("report.replicates=[seed]", "report.replicates has 'seed'; a replicate is another trace"),
    ],
)
def test_a_wrong_key_is_one_line(tmp_path: Path, say: Say, override: str, said: str) -> None:
    assert said in say("run", *TINY, *SHORT, override, f"hydra.run.dir={tmp_path / 'r'}").error()


SECONDS = "expected limits in seconds, as ttft_s=0.5,tpot_s=0.05"


@pytest.mark.parametrize(
    ("slo", "said"),
    [
        ("ttft_s", SECONDS),
        ("ttft_s=fast", SECONDS),
        ("", SECONDS),
        ("tfft_s=1", "a limit of --slo is 'tfft_s'; did you mean 'ttft_s'? choose one of ttft_s, tpot_s, "),
    ],
)
def test_a_wrong_slo_of_the_command_line_is_one_line(say: Say, slo: str, said: str) -> None:
    assert said in say("report", ".", "--slo", slo).error()
