"""From the command line: where the time of a run went, and prices fitted to a profile."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from analysis.measures.operators import format_operators, load_operators, operator_table
from analysis.reports.report import report_from_folders
from analysis.reports.trust import Source
from experiments import cost_model, simulate
from experiments.cli import main
from experiments.configuration.config import RunConfig
from experiments.configuration.saved import saved_config
from experiments.console import table
from experiments.wiring.build import build_estimator
from experiments.wiring.costs import build_cost
from sim.cost.calibrated import CalibratedCost
from sim.cost.calibration_file import load_calibration
from sim.cost.roofline import RooflineCost
from testbed import compiled
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError, RunFolderError
from testbed.specs.device import DeviceSpec
from testbed.specs.profiles import write_profile
from tests.cost.profiling import MODEL, grid, manifest, measured
from tests.experiments.kit import REAL, SHORT, TINY, config_of, latest, manifest_of

SMALL = [f"model.{name}={getattr(MODEL, name)}" for name in ("hidden_size", "num_hidden_layers", "vocab_size")]
FEW = ["trace.num_requests=30", "trace.prompt={kind: uniform, min_tokens: 20, max_tokens: 400}",
       "trace.output={kind: uniform, min_tokens: 2, max_tokens: 60}"]  # fmt: skip


def run(folder: Path, *overrides: str) -> Path:
    """A run that succeeds, in this folder."""
    assert main(["run", *latest(*overrides, f"hydra.run.dir={folder}")]) == 0
    return folder


def own(folder: Path, name: str) -> list[str]:
    """The arguments that choose the class of OWN of this name."""
    (folder / "own_costs.py").write_text(OWN)
    (folder / "conf" / "cost").mkdir(parents=True, exist_ok=True)
    (folder / "conf" / "cost" / "own.yaml").write_text(f"_target_: own_costs.{name}\n")
    return ["--config-dir", str(folder / "conf"), "cost=own"]


def spans_of(folder: Path) -> int:
    steps = pd.read_parquet(folder / "steps.parquet")
    return int(steps[["schedule_ns", "prepare_ns", "swap_ns", "forward_ns", "sample_ns"]].to_numpy().sum())


def test_a_policy_is_told_the_times_that_steps_take():
    config = config_of()
    estimator, cost = build_estimator(config), build_cost(config)
    shape = BatchShape(3, 90, (PrefillChunk(5, 20),), 4)
    assert estimator.step_ns(shape) == cost.price(shape).total_ns
    assert estimator.recompute_ns(5, 20) == cost.price(BatchShape(0, 0, (PrefillChunk(5, 20),), 1)).total_ns
    assert estimator.recompute_ns(5, 0) == 0


def test_a_policy_may_be_told_wrong_times():
    exact = build_estimator(config_of())
    shapes = [BatchShape(num, 90 * num, (PrefillChunk(5, 20),), num + 1) for num in range(1, 400)]
    low = build_estimator(config_of((*TINY, *SHORT, "scheduler.estimator.factor=0.8")))
    assert all(low.step_ns(shape) == round(0.8 * exact.step_ns(shape)) for shape in shapes)
    assert low.swap_ns(3) == round(0.8 * exact.swap_ns(3))
    noisy = [
        build_estimator(config_of((*TINY, *SHORT, "scheduler.estimator.sigma=0.1"), seed=seed)) for seed in (0, 0, 1)
    ]
    factors, again, others = ([one.step_ns(s) / exact.step_ns(s) for s in reversed(shapes)] for one in noisy)
    assert factors == again != others
    assert 0.08 < pd.Series(factors).apply(math.log).std() < 0.12
    assert len(set(factors)) == len(shapes)


def test_step_times_that_a_policy_knew_exactly_are_said(tmp_path, capsys):
    swaps = ("scheduler.preemption=cheaper", "cache.num_cpu_blocks=64", "cache.num_gpu_blocks=20", *SHORT)
    for name, more, is_said in (("exact", (), True), ("wrong", ("scheduler.estimator.factor=0.9",), False),
                                ("unasked", ("cache.num_gpu_blocks=64",), False)):  # fmt: skip
        folder = run(tmp_path / name, *TINY, *swaps, "trace.rate=4000", *more)
        (*notes,) = (note for note in manifest_of(folder)["cost_notes"] if note.startswith("foresight: "))
        assert len(notes) == capsys.readouterr().out.count("told its exact time") == is_said, name


@pytest.mark.parametrize("cost", ["roofline", "linear", "constant"])
def test_operators_add_up_to_the_spans_of_the_run(tmp_path, cost):
    options = [f"cost={cost}", "record.operators=true"]
    pool = ["cache.num_gpu_blocks=60", "scheduler=vllm_v0", "scheduler.preemption=swap"]  # swaps
    folder = run(tmp_path / "run", *FEW, *options, *pool)
    document = load_operators(folder)
    assert document["parts"] == "operators"
    assert int(operator_table(document)["total"].sum()) == spans_of(folder)
    assert sum(phase["num_steps"] for phase in document["phases"].values()) == len(
        pd.read_parquet(folder / "steps.parquet")
    )


@pytest.mark.parametrize("more", [(), ("backend.num_replicas=2",)], ids=["one", "two"])
def test_steps_that_are_planned_ahead_last_from_the_end_of_the_step_before(tmp_path, more):
    options = ["cost=roofline", "scheduler=vllm_v1_async", "record.operators=true", *more]
    folder = run(tmp_path / "run", *FEW, *options)
    steps = pd.read_parquet(folder / "steps.parquet")
    durations = [phase["duration_ns"] for phase in load_operators(folder)["phases"].values()]
    assert sum(durations) == (steps["end_ns"] - steps["start_ns"]).sum()


def test_what_a_backend_adds_to_a_price_is_told_apart(tmp_path):
    """Swaps on a link beside the computation, and the scheduler's own time."""
    more = ["backend.swap_overlap=true", "backend.schedule_ns=1000", "backend.schedule_ns_per_seq=10"]
    pool = ["cache.num_gpu_blocks=60", "scheduler=vllm_v0", "scheduler.preemption=swap"]
    folder = run(tmp_path / "run", *FEW, *more, *pool, "record.operators=true")
    table = operator_table(load_operators(folder)).set_index("operator")["total"]
    assert int(table.sum()) == spans_of(folder)
    steps = pd.read_parquet(folder / "steps.parquet")
    assert table["scheduler"] == steps["schedule_ns"].sum() > 0
    assert table["swap"] + table.get("link", 0) == steps["swap_ns"].sum()


def test_the_command_prints_a_table(tmp_path, say):
    text = say("costs", str(run(tmp_path / "run", *FEW, "record.operators=true"))).success()
    assert " ".join(text.splitlines()[0].split()) == "operator prefill s decode s mixed s total s share"
    assert "gate_up" in text
    assert "100.0%" in text


def test_a_name_steers_no_terminal(tmp_path, say):
    document = {"format": 1, "parts": "operators", "phases": {"decode": DECODES | {"ns": {"\x1b[2J\u202eqkv": 7}}}}
    (tmp_path / "operators.json").write_text(json.dumps(document))
    assert r"\x1b[2J\u202eqkv" in say("costs", str(tmp_path)).success()
    assert table(["\x1ba"], [["\u200fb"]]).splitlines()[::2] == [r"| \x1ba   |", r"| \u200fb |"]


def test_a_real_run_and_a_users_model_without_a_breakdown_go_by_spans(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    folder = run(tmp_path / "real", *TINY, *SHORT, *REAL, "record.operators=true")
    document = load_operators(folder)
    assert document["parts"] == "spans"
    assert int(operator_table(document)["total"].sum()) == spans_of(folder)
    assert "idle or overlap" in format_operators(document)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = run(tmp_path / "own", *own(tmp_path, "Plain"), *FEW, "record.operators=true")
    document = load_operators(folder)
    assert document["parts"] == "spans"
    assert int(operator_table(document)["total"].sum()) == spans_of(folder)


OWN = """
from testbed.core.outcome import Spans

class Plain:
    def price(self, shape):
        return Spans(1, 2, 3, 1000 * shape.num_tokens, 5)

class Wrong(Plain):
    def breakdown(self, shape):
        return {"all": 7}

class Below(Plain):
    def breakdown(self, shape):
        return {"all": 16 + sum(self.price(shape)), "credit": -16}

class Told(Plain):
    def bind(self, context):
        assert context.tensor_parallel_size == 2 and context.kv_layout.kv_dtype == "fp8"
        assert context.kv_layout.block_size == 32 and context.sampling.top_k == 5

class Endless(Plain):
    def price(self, shape):
        return Spans(forward_ns=10**400)
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Wrong", "own_costs.Wrong.breakdown says 7 ns in all of BatchShape("),
        ("Below", "own_costs.Below.breakdown says credit=-16 of BatchShape("),
    ],
)
def test_a_breakdown_that_does_not_add_up_is_one_line(tmp_path, monkeypatch, say, name, told):
    monkeypatch.syspath_prepend(str(tmp_path))
    priced = ("record.operators=true", f"hydra.run.dir={tmp_path / 'run'}")
    assert told in say("run", *own(tmp_path, name), *FEW, *priced).error()


def test_an_own_model_knows_ranks_cache_and_sampling(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    more = ("device.tensor_parallel_size=2", "cache.kv_dtype=fp8", "cache.block_size=32", "sampling.top_k=5")
    folder = run(tmp_path / "run", *own(tmp_path, "Told"), *FEW, *more)
    source = Source.of(manifest_of(folder), {})
    assert source.level == "poor"
    assert source.said == "of own_costs.Told, a cost model of one's own; nothing says how far it is off"


def test_a_cost_model_prices_single_steps():
    shape = BatchShape(64, 64 * 2000, (PrefillChunk(8000, 512),), 64)
    one, two = (
        cost_model(model="llama3.1_8b", device={"name": "h100", "tensor_parallel_size": ranks}) for ranks in (1, 2)
    )
    assert sum(one.breakdown(shape).values()) == one.price(shape).total_ns > two.price(shape).total_ns
    with pytest.raises(ConfigError, match=r"cost\.path"):
        cost_model(cost={"name": "roofline", "path": "x"})


def test_options_in_a_folder_of_ones_own_are_for_python_too(tmp_path):
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "slower.yaml").write_text("defaults: [h100, _self_]\nmemory_bytes_per_s: 1e12\n")
    run = simulate([{"arrival_time": 0, "prompt_tokens": 9, "output_tokens": 9}], device="slower", config_dir=tmp_path)
    assert run.config["device"]["name"] == "slower"
    shape = BatchShape(64, 64 * 2000, (), 64)
    slower, h100 = (cost_model(device=name, config_dir=tmp_path).price(shape) for name in ("slower", "h100"))
    assert slower.total_ns > 2 * h100.total_ns
    with pytest.raises(ConfigError, match="--config-dir is 'nowhere'; name a folder"):
        cost_model(config_dir="nowhere")


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_price_that_no_clock_can_hold_is_one_line(tmp_path, monkeypatch, say, replicas):
    monkeypatch.syspath_prepend(str(tmp_path))
    fleet = (f"backend.num_replicas={replicas}", f"hydra.run.dir={tmp_path / 'run'}")
    error = say("run", *own(tmp_path, "Endless"), *FEW, *fleet).error()
    assert "the simulated clock passes 4.6e+09 s: a step lasts 1.00e+391 s; check" in error


def test_a_run_without_the_file_and_a_damaged_one_are_one_line(tmp_path, say):
    folder = run(tmp_path / "run", *FEW)
    assert "has no operators.json; run it with record.operators=true" in say("costs", str(folder)).error()
    assert "no run at" in say("costs", str(tmp_path / "nowhere")).error()
    for text, message in (("{", "Expecting"), ("[]", "is not a JSON object"), ("[" * 100_000, "nested too deeply")):
        (folder / "operators.json").write_text(text)
        with pytest.raises(RunFolderError, match=rf"operators\.json.*{message}"):
            load_operators(folder)


DECODES = {"num_steps": 2, "duration_ns": 9, "ns": {"qkv": 7, "link": -2}}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"parts": None}, {"phases": {"decodes": DECODES}}, {"phases": {"decode": 3}},
        {"phases": {"decode": {"ns": {}}}}, {"num_steps": -1}, {"duration_ns": 1.5}, {"ns": [1]}, {"ns": {"qkv": "x"}},
        {"ns": {"qkv": -7}}, {"ns": {"link": 10**400}},
    ],
)  # fmt: skip
def test_what_a_file_of_operators_must_say(tmp_path, say, change):
    phase = DECODES | {name: value for name, value in change.items() if name in DECODES}
    document = {"format": 1, "parts": "operators", "phases": {"decode": phase}}
    (tmp_path / "operators.json").write_text(json.dumps(document))
    if phase == DECODES:
        assert load_operators(tmp_path) == document
        document |= change
        (tmp_path / "operators.json").write_text(json.dumps(document))
    assert "operators.json is not as this version writes it; run it again" in say("costs", str(tmp_path)).error()


def test_an_older_folder_whose_linear_cost_names_no_file_is_repeated(tmp_path):
    folder = run(tmp_path / "run", *FEW, "cost=linear")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("  base_s:", "  path: null\n  base_s:"))
    assert main(["run", f"from={folder}", f"hydra.run.dir={tmp_path / 'again'}"]) == 0
    config.write_text(config.read_text().replace("path: null\n  base_s", "path: fit.json\n  base_s"))
    assert main(["run", f"from={folder}", f"hydra.run.dir={tmp_path / 'fitted'}"]) == 1, "its prices are not these"


@pytest.mark.parametrize("packs", ["true", "false"])
def test_an_older_folder_keeps_its_kind_of_mixed_attention(packs, tmp_path):
    folder = run(tmp_path / "run", *TINY, *SHORT)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("mixed_attention: packed", f"attention_packs_heads: {packs}"))
    again = RunConfig.from_container(saved_config(folder)).device
    assert again.mixed_attention == ("packed" if packs == "true" else "unpacked")


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [((), None), (("cost.mixed_attention=split",), "split on h100"), (("device=b200",), "split on b200"),
     (("device=b200", "scheduler=prefill_first"), None), (("device=a100",), "unpacked on a100")],
)  # fmt: skip
@pytest.mark.usefixtures("unrendered")
def test_mixed_steps_whose_times_nobody_compared_are_said_once(overrides, kind, tmp_path, capsys):
    folder = run(tmp_path / "run", *TINY, *SHORT, *overrides)
    notes = manifest_of(folder)["cost_notes"]
    assert capsys.readouterr().out.count("mixed steps: ") == len(notes) == (kind is not None)
    if kind:
        assert f" priced as {kind}, which nobody compared with an engine" in notes[0]
        page = report_from_folders([folder], tmp_path / "page.html").with_suffix(".md").read_text()
        assert notes[0] in page


def test_a_core_that_runs_interpreted_without_being_asked_to_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    why = "not compiled: nothing was built for this Python"
    monkeypatch.setattr(compiled, "current", lambda: compiled.Core("interpreted", why))
    run(tmp_path / "run", "trace.num_requests=2")
    note = f"note         the core ran interpreted ({why}), several times slower (docs/compiled.md)"
    assert note in capsys.readouterr().out


# --- calibrated ---


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("profile") / "profile.parquet"
    write_profile(file, manifest(), measured(RooflineCost(MODEL, DeviceSpec("h100")), grid(), noise=0.02, repeats=2))
    return file


@pytest.fixture(scope="module")
def fit(profile) -> Path:
    file = profile.with_suffix(".json")
    assert main(["calibrate", "fit", str(profile), "--out", str(file)]) == 0
    return file


def calibrated(*overrides: str) -> list[str]:
    return [*FEW, *SMALL, "model.dtype=bfloat16", "cost=calibrated", *overrides]


def test_a_profile_is_fitted_saved_and_priced_with(tmp_path, profile, say):
    fit = tmp_path / "fit.json"
    command = ("calibrate", "fit", str(profile), "--out", str(fit))
    text = say(*command).success()
    parts = ("small (bfloat16) on h100", "  decode ", "  prefill ", "  mixed ", "profiled range", f"cost.path={fit}")
    assert [part for part in parts if part not in text] == []
    assert "exists; choose another --out or pass --overwrite" in say(*command).error()
    loaded = run(tmp_path / "loaded", *calibrated("record.operators=true"), f"cost.path={fit}")
    assert int(operator_table(load_operators(loaded))["total"].sum()) == spans_of(loaded)
    assert isinstance(CalibratedCost(load_calibration(fit)), CalibratedCost)


@pytest.mark.usefixtures("unrendered")
def test_a_run_says_how_far_its_fit_is_off_and_so_do_its_report_and_the_fit_of_noise(tmp_path, fit, capsys):
    options = calibrated("cost.outside=allow")
    folder = run(tmp_path / "run", *options, f"cost.path={fit}")
    error = manifest_of(folder)["cost_error"]
    assert 0 < error["median"] < error["p90"] < 0.1
    told = f"cost=calibrated (left-out steps: {error['median']:.1%} off, P90 {error['p90']:.1%}), scheduler="
    assert told in capsys.readouterr().out
    page = report_from_folders([folder], tmp_path / "page.html").with_suffix(".md").read_text()
    assert "fitted to measured steps; those left out of the fit are " in page
    assert "of the steps leave the profiled range |" in page, "what is allowed is counted, and not said in the run"
    file, steps = tmp_path / "noisy.parquet", measured(RooflineCost(MODEL, DeviceSpec("h100")), grid(), repeats=2)
    slow = [Spans(*(3 * ns for ns in step.spans)) for step in steps]
    busy = [one if i % 2 else one._replace(spans=slow[i], total_ns=sum(slow[i])) for i, one in enumerate(steps)]
    write_profile(file, manifest(), busy)
    assert main(["calibrate", "fit", str(file), "--out", str(tmp_path / "noisy.json")]) == 0
    said = capsys.readouterr().out
    assert "note         LARGE ERROR: steps left out of the calibrated fit are " in said
    assert "; use it (only to try it out: with this error it compares no policies) with cost=calibrated " in said
    folder = run(tmp_path / "noisy", *options, f"cost.path={tmp_path / 'noisy.json'}")
    page = report_from_folders([folder], tmp_path / "noisy.html").with_suffix(".md").read_text()
    assert "| step times | poor | fitted to measured steps; those left out of the fit are " in page


@pytest.mark.usefixtures("unrendered")
def test_a_cpu_has_no_data_sheet_to_trust(tmp_path, capsys):
    folder = run(tmp_path / "run", *TINY, *SHORT, "device=cpu")
    assert "note         the step times are made up: no data sheet gives a CPU's" in capsys.readouterr().out
    page = report_from_folders([folder], tmp_path / "page.html").with_suffix(".md").read_text()
    assert "| step times | poor | made up: no data sheet gives a CPU's; testbed calibrate measures them |" in page


@pytest.mark.usefixtures("unrendered")
def test_what_leaves_the_range_is_said_once_and_loudly(tmp_path, fit, capsys, say):
    far = ["trace.prompt={kind: constant, value: 3000}", f"cost.path={fit}"]
    folder = run(tmp_path / "warned", *calibrated(*far))
    manifest = manifest_of(folder)
    (note,) = manifest["cost_notes"]
    told = f"{manifest['num_extrapolated_steps']:,} of {manifest['num_steps']:,} steps leave the profiled range"
    assert note.startswith(f"EXTRAPOLATED STEP TIMES: {told}")
    page = report_from_folders([folder], tmp_path / "page.html").with_suffix(".md").read_text()
    assert "| step times | fair | fitted to measured steps; those left out of the fit are " in page
    assert f" %; EXTRAPOLATED STEP TIMES: {told}" in page
    assert "x outside) in " in note
    assert capsys.readouterr().out.count(note) == 1
    assert note in (folder / "run.log").read_text()
    mostly = run(tmp_path / "mostly", *calibrated(*far, "trace.output={kind: constant, value: 1}"))
    page = report_from_folders([folder, mostly], tmp_path / "both.html").with_suffix(".md").read_text()
    assert "| step times | poor | fitted to measured steps; " in page
    folder = run(tmp_path / "allowed", *calibrated(*far, "cost.outside=allow"))
    assert manifest_of(folder)["cost_notes"] == []
    refused = say("run", *calibrated(*far, "cost.outside=refuse"), f"hydra.run.dir={tmp_path / 'refused'}")
    assert "leaves the profiled range: " in refused.error()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model=llama3.1_8b", "is of model 'small'"),
        ("device=a100", "measured with device h100, and the run has a100"),
        ("cache.block_size=32", "measured with block_size 16, and the run has 32"),
    ],
)
def test_a_fit_to_another_model_device_or_block_size_is_one_line(tmp_path, fit, say, change, words):
    given = (*FEW, *(SMALL if "model" not in change else []), "cost=calibrated", change, f"cost.path={fit}")
    assert words in say("run", *given, f"hydra.run.dir={tmp_path / 'x'}").error()


def test_the_real_engine_is_profiled_and_its_profile_prices_a_run(tmp_path, capsys):
    pytest.importorskip("torch")
    file = tmp_path / "real.parquet"
    tiny = [item for item in TINY if not item.startswith("cache.block_size")]
    options = [*tiny, "cache.block_size=16", "backend.num_threads=1", "backend.device=cpu"]
    few = ["--quick", "--repeats", "1", "--requests", "4", "--max-seconds", "3"]
    assert main(["calibrate", "profile", *options, *few, "--out", str(file)]) == 0
    assert "steps of " in capsys.readouterr().out
    fit = tmp_path / "fit.json"
    assert main(["calibrate", "fit", str(file), "--out", str(fit)]) == 0
    priced = ("cache.block_size=16", "device=cpu", "cost=calibrated", f"cost.path={fit}")
    folder = run(tmp_path / "run", *TINY, *SHORT, *priced)
    assert manifest_of(folder)["cost"] == "calibrated"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "absent.parquet"], "no profile at absent.parquet"),
        (["fit", "absent.parquet", "--folds", "1"], "--folds is 1; it must be from 2 to 20"),
        (["profile", "backend=sim", "--out", "x.parquet"], "only the real engine can be profiled"),
        (["profile", "--requests", "1", "--out", "x.parquet"], "--requests is 1; it must be from 4 to 10,000"),
    ],
)
def test_impossible_commands_are_one_line(arguments, message, say):
    assert message in say("calibrate", *arguments).error()
