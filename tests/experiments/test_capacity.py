"""`testbed capacity`: capacities that queueing theory or arithmetic knows, early stops, what is said, mistakes."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.load import load_run
from analysis.measures.capacity import Edge, Load, count_load, edge_change, mean_edge
from analysis.measures.slo import SLO
from experiments import find_capacity
from experiments.capacity.arms import beyond_names, parse
from experiments.capacity.command import warnings, without_capacity
from experiments.capacity.found import Found, Replicate
from experiments.capacity.points import SloWatch
from experiments.capacity.search import Ask, Bracket, search
from experiments.configuration.config import RunConfig
from experiments.runs.run import execute
from testbed.errors import RunFolderError
from tests.experiments.capacity_kit import BUSY, ends
from tests.experiments.kit import REAL, SHORT, TINY, Said, Say, config_of, write_rows

ONE_TOKEN = (
    "model=tiny", "cost=constant", "cost.step_s=0.01", "scheduler.max_num_seqs=1", "cache.prefix_caching=false",
    "cache.num_gpu_blocks=4096", "trace.prompt={kind: constant, value: 1}", "trace.output={kind: constant, value: 1}",
)  # fmt: skip


def capacity_of(folder: Path, *overrides: str, **options: Any) -> Found:
    (found,) = find_capacity(*overrides, folder=folder, **options).found
    return found


def first_failed(found: Found) -> str | None:
    """The limit over which most requests are at the lowest rate that failed."""
    assert found.at_failed is not None
    return found.at_failed.first_failed(found.arm.share)


# --- the search alone ---


def answered(start: float, tolerance: float, keeps: Any) -> tuple[Bracket, list[Ask]]:
    asked, searching = [], search(start, tolerance)
    ask = next(searching)
    while True:
        asked.append(ask)
        try:
            ask = searching.send(keeps(ask.value))
        except StopIteration as ended:
            return ended.value, asked


@given(st.floats(0.01, 100), st.floats(0.02, 50))
def test_the_edge_is_found_from_either_side(start: float, edge: float) -> None:
    bracket, asked = answered(start, 0.02, lambda rate: rate <= edge)
    if bracket.kept is None or bracket.failed is None:
        assert edge < start / 1000 or edge > start * 1000
        return
    assert bracket.kept <= edge < bracket.failed <= bracket.kept * 1.021
    assert len(asked) < 25


@given(st.integers(0, 2**32), st.floats(0.01, 100))
def test_it_ends_whatever_the_verdicts_are(bits: int, start: float) -> None:
    bracket, asked = answered(start, 0.001, lambda rate: bool(hash((bits, rate)) % 2))
    assert len(asked) < 40
    verdicts = {ask.value: bool(hash((bits, ask.value)) % 2) for ask in asked}
    assert bracket.kept is None or verdicts[bracket.kept]
    assert bracket.failed is None or not verdicts[bracket.failed]


# --- known capacities ---


def test_regular_arrivals_to_a_server_of_constant_time(tmp_path: Path) -> None:
    """D/D/1, 10 ms: below 100 requests/s nobody waits, above it the queue grows."""
    found = capacity_of(
        tmp_path, *ONE_TOKEN, "trace.arrival=deterministic", "trace.num_requests=2000", "slo.ttft_s=0.05",
        "trace.rate=64", tolerance=0.005,
    )  # fmt: skip
    kept, failed = ends(found)
    assert kept <= 100.5
    assert 99.9 <= failed <= kept * 1.006
    assert first_failed(found) == "ttft_s"


def test_poisson_arrivals_to_a_server_of_constant_time(tmp_path: Path) -> None:
    """M/D/1 (Erlang, 1909): the rate at which 99 % wait 40 ms at most, services being 10 ms."""
    found = capacity_of(tmp_path, *ONE_TOKEN, "trace.num_requests=6000", "trace.rate=56", "slo.ttft_s=0.05", "seed=0,1")
    low, high = 1.0, 99.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if waits_at_most(0.04, middle, 0.01) >= 0.99 else (low, middle)
    assert found.capacity == pytest.approx(low, rel=0.05)
    at = found.at_kept
    assert at is not None
    assert at.num_requests == 12_000, "of both seeds"


def waits_at_most(time_s: float, rate: float, service_s: float) -> float:
    terms = range(int(time_s / service_s + 1e-9) + 1)
    late = [rate * (time_s - k * service_s) for k in terms]
    return (1 - rate * service_s) * sum((-x) ** k / math.factorial(k) * math.exp(x) for k, x in enumerate(late))


def test_a_queue_that_grows_fails_although_no_limit_does(tmp_path: Path) -> None:
    """A step of 10 ms serves four: 400 requests/s. The limit is too wide for the trace to reach it."""
    more = ("scheduler.max_num_seqs=4", "trace.arrival=deterministic", "trace.num_requests=3000", "trace.rate=256")
    found = capacity_of(tmp_path, *ONE_TOKEN[:3], *ONE_TOKEN[4:], *more, "slo.ttft_s=1000")
    kept, failed = ends(found)
    assert kept <= 400 * 1.12
    assert failed >= 400
    assert first_failed(found) == "queue"


def test_time_per_token_that_grows_with_the_batch(tmp_path: Path) -> None:
    """A step takes a + b N; N = rate (K - 1) step. So a step is 30 ms at rate (1 - a / 30 ms) / (b (K - 1))."""
    coefficients = ("base_s=0.01", "per_decode_s=0.001", "per_prefill_token_s=0", "per_decode_context_token_s=0",
                    "per_prefill_attention_pair_s=0")  # fmt: skip
    more = [f"cost.{item}" for item in coefficients]
    found = capacity_of(
        tmp_path, "model=tiny", "cost=linear", *more, "cache.prefix_caching=false", "cache.num_gpu_blocks=4096",
        "trace.arrival=deterministic", "trace.prompt={kind: constant, value: 1}",
        "trace.output={kind: constant, value: 50}", "trace.num_requests=1000", "trace.rate=8", "slo.tpot_s=0.03",
    )  # fmt: skip
    assert found.capacity == pytest.approx((1 - 0.01 / 0.03) / (0.001 * 49), rel=0.04)
    assert first_failed(found) == "tpot_s"


def test_a_recorded_trace_is_scaled_and_its_rate_reported(tmp_path: Path) -> None:
    """The same requests generated and recorded, the latter at 25 a second: the same capacity."""
    rows = [{"arrival_time": i / 25, "prompt_tokens": 1, "output_tokens": 1} for i in range(500)]
    file = write_rows(tmp_path / "t.jsonl", rows)
    server = (*ONE_TOKEN[:6], "slo.ttft_s=0.05")
    recorded = capacity_of(tmp_path / "a", *server, "trace=jsonl", f"trace.path={file}")
    assert recorded.arm.rate_key == "trace.rate_scale"
    assert recorded.arm.per_value == pytest.approx(25)
    made = ("trace.arrival=deterministic", "trace.rate=25", "trace.num_requests=500")
    generated = capacity_of(tmp_path / "b", *server, *ONE_TOKEN[6:], *made)
    assert ends(recorded) == pytest.approx(ends(generated), rel=1e-3)


def test_seeds_that_draw_from_one_record_have_intervals_that_allow_for_it(tmp_path: Path) -> None:
    rows = [{"arrival_time": i / 25, "prompt_tokens": 1, "output_tokens": 1 + i % 4} for i in range(300)]
    recorded = (*ONE_TOKEN[:6], "trace=jsonl", f"trace.path={write_rows(tmp_path / 't.jsonl', rows)}")
    for drawn, known in (
        ((*recorded, "trace.transforms=[{name: bootstrap}]"), 0.5),
        ((*recorded, "trace.transforms=[{name: thin, fraction: 0.3}]"), 0.3),
        ((*recorded, "trace.transforms=[{name: copies, num: 2.5, within_s: 3}]"), 0.0),  # all are, at other instants
        ((*TINY, "trace.num_requests=20"), 0.0),
    ):
        ((arm,), _) = parse([*drawn, "slo.ttft_s=0.05", "seed=0,1,2"])
        assert arm.correlation == pytest.approx(known, abs=0.05), drawn
    edges = [Edge(rate, rate * 1.0001, rate) for rate in (10.0, 11.0, 12.5)]
    alone, shared = mean_edge(edges), mean_edge(edges, 0.5)
    assert shared.high - shared.low == pytest.approx(2 * (alone.high - alone.low), rel=1e-2)
    assert edge_change(edges, edges[::-1], 0.5).high > edge_change(edges, edges[::-1]).high
    found = find_capacity(
        *recorded, "trace.transforms=[{name: bootstrap}]", "slo.ttft_s=0.05", "seed=0,1,2", folder=tmp_path / "out"
    ).found[0]
    assert found.edges is not None
    assert found.interval is not None
    assert math.log(found.interval[1] / found.arm.per_value) == pytest.approx(mean_edge(found.edges, 0.5).high)


def test_the_rate_of_a_transformed_trace_is_that_of_its_requests() -> None:
    """25 sessions of two turns a second, of which the first turns are left; they come twice as fast as trace.rate."""
    left = "trace.transforms=[{name: filter, max_turn: 0}, {name: scale_rate, factor: 2}]"
    turns = ("trace.arrival=deterministic", "trace.rate=25", "trace.min_turns=2", "trace.max_turns=2")
    (arm,), _ = parse((*ONE_TOKEN, "slo.ttft_s=0.05", *turns, left))
    assert (arm.rate_key, arm.unit, arm.per_value) == ("trace.rate", "req/s", pytest.approx(2))


def test_the_rate_of_tenants_with_turns_of_their_own_is_that_of_their_sessions() -> None:
    """Half of 30 a second are single requests, and the other half have sessions of three turns, so 5 a second."""
    tenants = "trace.tenants=[{name: chat, min_turns: 3, max_turns: 3}, {name: batch}]"
    made = ("trace.arrival=deterministic", "trace.rate=30", "trace.num_requests=600", tenants)
    (arm,), _ = parse((*ONE_TOKEN, "slo.ttft_s=0.05", *made))
    assert (arm.unit, arm.per_value) == ("sessions/s", pytest.approx(20 / 30, rel=0.02))


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("num_turns", [1, 2])
def test_what_sessions_and_requests_are_counted_for_is_said(num_turns: int, tmp_path: Path, say: Say) -> None:
    turns = (f"trace.min_turns={num_turns}", f"trace.max_turns={num_turns}", "trace.num_requests=60")
    said = say("capacity", *TINY, *SHORT, *turns, "slo.ttft_s=1e-3", "--out", str(tmp_path / "a")).out
    told = "(60 requests; capacity counts sessions, of 2 requests in the mean, and goodput requests)"
    assert (told in said, "sessions/s" in said) == (num_turns == 2, num_turns == 2)


# --- early stops ---


@pytest.mark.parametrize(
    ("limits", "more"),
    [
        (("slo.ttft_s=0.2", "slo.tpot_s=0.015"), ()),
        (("slo.e2e_s=0.4", "slo.attainment=0.9"), ("seed=0,1",)),
        (("slo.itl_max_s=0.05", "slo.attainment=0.8"), ("scheduler.async_scheduling=true", "scheduler=vllm_v1")),
        (("slo.ttft_s=0.1", "slo.tpot_s=0.02", "slo.attainment=0.9"), ("backend.num_replicas=2", "sampling.n=2")),
    ],
)
def test_an_early_stop_changes_no_verdict(limits: tuple[str, ...], more: tuple[str, ...], tmp_path: Path) -> None:
    early = find_capacity(*BUSY, *limits, *more, folder=tmp_path / "a", tolerance=0.1)
    whole = find_capacity(*BUSY, *limits, *more, folder=tmp_path / "b", tolerance=0.1, whole=True)
    assert early.points["is_whole"].mean() < 1, "nothing was stopped"
    assert whole.points["is_whole"].all()
    assert [found.bracket for found in early.found] == [found.bracket for found in whole.found]
    keys = ["policy", "rate", "seed", "kept"]
    assert early.points[keys].to_dict("records") == whole.points[keys].to_dict("records")


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("backend.num_replicas=2", "backend.frontend_ns=3000000"),
        ("scheduler=vllm_v1", "scheduler.async_scheduling=true"),
        ("trace.max_turns=3", "trace.think_time_s=0.05"),
        ("trace.prompt={kind: uniform, min_tokens: 60, max_tokens: 120}",),  # some can never fit
    ],
)
def test_what_the_watch_counts_is_what_the_records_say(more: tuple[str, ...], tmp_path: Path) -> None:
    limits = {"ttft_s": 0.15, "tpot_s": 0.012, "itl_max_s": 0.03, "e2e_s": 0.5, "lateness_s": 0.1}
    classes = [{"tenant": "a", "ttft_s": 0.05}, {"tenant": "b", "priority": 0, "e2e_s": None, "itl_max_s": 0.02}]
    tenants = "trace.transforms=[{name: label, classes: [{tenant: a}, {tenant: b}, {tenant: c}]}]"
    raw = config_of((*BUSY, "trace.rate=30", "trace.deadline_s=0.3", tenants, *more), record__steps=False).raw
    raw["slo"] |= limits | {"classes": classes}
    slo = SLO.parse(limits | {"classes": classes})
    assert slo is not None
    watch = SloWatch(slo, 10**9)
    execute(RunConfig.from_container(raw), tmp_path / "run", watch=watch)
    found = count_load(load_run(tmp_path / "run").requests, slo, 1.0)
    assert 10 < found.num_failed == watch.num_failed
    if not found.over["unfinished"]:  # of what is ignored after a while the records have no TTFT
        assert watch.over == {name: count for name, count in found.over.items() if count}


# --- what is said ---


def test_a_pool_that_the_gpu_could_not_hold_is_told(tmp_path: Path, say: Say) -> None:
    for memory_bytes, is_told in ((10**6, True), (10**12, False)):
        device = ("device=h100", f"device.memory_bytes={memory_bytes}", "cache.num_gpu_blocks=400")
        said = say("capacity", *BUSY, *device, "slo.ttft_s=0.2", "--out", str(tmp_path / str(memory_bytes))).success()
        assert ("cache.num_gpu_blocks=400 and the weights take" in said) is is_told


def test_the_table_the_files_and_the_names(tmp_path: Path, say: Say) -> None:
    more = ("scheduler.max_num_seqs=2,8", "slo.ttft_s=0.2", "--out", str(tmp_path))
    said = say("capacity", *(item for item in BUSY if "max_num_seqs" not in item), *more).success()
    assert re.search(r"^\| max num seqs 2 +\| [\d.]+ req/s +\| [\d.]+ ", said, re.MULTILINE)
    assert "note: one seed: the interval takes requests as independent, which they are not" in said
    assert "beyond their names" not in said
    result = json.loads((tmp_path / "capacity.json").read_text())
    two, eight = result["policies"]
    assert two["capacity"] < eight["capacity"]
    low, high = two["attainment_wilson95"]
    assert low <= two["attainment"] <= high
    assert (two["ci95_low"], two["change"], eight["change"]) == (None, None, None), "one seed has no spread"
    assert two["fails_first"] == "ttft_s"
    assert (tmp_path / "capacity.png").exists()
    text = (tmp_path / "capacity.md").read_text()
    assert said.splitlines()[0] in text
    assert "\n- note: one seed: " in text, "else Markdown runs the notes together"
    assert "![goodput and attainment](capacity.png)" in text


def test_policies_are_called_as_in_a_report() -> None:
    order = "scheduler.queue_order=fcfs,{_target_: testbed.policies.orders.priority, ageing_per_s: 0.1}"
    arms, _ = parse((*TINY, *SHORT, "slo.ttft_s=1", "scheduler=vllm_v1,sarathi", order))
    last = "queue order priority(ageing_per_s=0.1)"
    assert [arm.name for arm in arms[:2]] == ["vllm_v1, queue order fcfs", f"vllm_v1, {last}"]
    assert arms[3].name == f"sarathi, {last}"
    said = beyond_names(arms)
    assert said.startswith("scheduler.composition unified/decode_first; scheduler.preemption auto/recompute; ")
    assert "queue_order" not in said
    assert "max_num_seqs" not in said, "one for all"
    arms, _ = parse((*TINY, *SHORT, "slo.ttft_s=1", "cost=roofline,constant"))
    assert beyond_names(arms) == "", "settings of a cost model are in its name"


@pytest.mark.usefixtures("unrendered")
def test_settings_of_presets_that_differ_are_said_with_their_capacities(tmp_path: Path, say: Say) -> None:
    presets = ("scheduler=vllm_v1,sarathi", "slo.ttft_s=1", "trace.num_requests=20", "--out", str(tmp_path))
    said = say("capacity", *presets).out
    (note,) = [
        line for line in said.splitlines() if line.startswith("note: the policies differ beyond their names, in")
    ]
    assert "; scheduler.max_num_seqs 256/128; " in note
    assert f"- {note}" in (tmp_path / "capacity.md").read_text()


@pytest.mark.usefixtures("unrendered")
def test_a_model_of_a_folder_goes_by_its_name(tmp_path: Path, say: Say) -> None:
    folder = tmp_path / "own_model"
    folder.mkdir()
    shape = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(shape | heads))
    settings = (*ONE_TOKEN, f"model.path={folder}", "slo.ttft_s=1", "slo.attainment=0.5", "trace.num_requests=20")
    said = say("capacity", *settings, "--out", str(tmp_path / "found")).success()
    assert "sim, own_model on " in said


@pytest.mark.usefixtures("unrendered")
def test_no_rate_is_low_enough_or_high_enough(tmp_path: Path, say: Say) -> None:
    said = say("capacity", *ONE_TOKEN, "slo.ttft_s=0.009", "--out", str(tmp_path / "low"))
    assert "200 of 200 requests are over slo.ttft_s (0.009 s, with a mean of 0.01 s)" in said.error()
    assert "| vllm_v1 | 0 req/s " in said.out
    said = say("capacity", *ONE_TOKEN, "slo.ttft_s=0.05", "trace.rate=1e6", "--out", str(tmp_path / "haste"))
    assert "has a capacity below 976.5 req/s, the lowest rate tried: " in said.error()
    assert "; start lower, as trace.rate=488.275, or widen the limit" in said.error()
    assert "| vllm_v1 | < 976.5 req/s " in said.out
    never = (*ONE_TOKEN, "trace.prompt={kind: constant, value: 40}", "cache.num_gpu_blocks=1", "slo.ttft_s=1")
    said = say("capacity", *never, "--out", str(tmp_path / "never"))
    assert "they can never fit, or were cancelled; give them more KV blocks (cache.num_gpu_blocks, " in said.error()
    fast = (*ONE_TOKEN, "cost.step_s=1e-6", "slo.ttft_s=1")
    said = say("capacity", *fast, "--out", str(tmp_path / "high"))
    assert "keeps its SLO at every rate up to 4096 req/s" in said.error()
    assert json.loads((tmp_path / "high" / "capacity.json").read_text())["policies"][0]["failed_at"] is None


@pytest.mark.usefixtures("unrendered")
def test_what_makes_a_number_doubtful_is_said(tmp_path: Path, say: Say) -> None:
    said = say("capacity", *TINY, *SHORT, "slo.ttft_s=1e-3", "--out", str(tmp_path / "a"))
    assert "may fail: a few requests decide" in said.out
    hasty = ("trace.num_requests=60", "slo.e2e_s=0.8", "slo.attainment=0.5")
    said = say("capacity", *BUSY, *hasty, "--out", str(tmp_path / "b"))
    assert re.search(r"the run is short: .* give at least [\d,]+ requests", said.out)
    arm = find_capacity(*TINY, *SHORT, "slo.ttft_s=1e-3", folder=tmp_path / "a").found[0].arm
    good = Load(True, 1000, 0, {"ttft_s": 0}, num_customers=1001, arriving_s=250.0)
    bad = Load(True, 1000, 90, {"ttft_s": 90})
    one = Replicate(7, Bracket(2.0, 4.0), ((2.0, good), (4.0, bad), (5.0, good)))
    found = Found(arm, (one,))
    assert (found.capacity, one.extreme(0.99, kept=True), one.extreme(0.99, kept=False)) == (2.0, 5.0, 4.0)
    assert any("5 req/s is kept although 4 is not (seed=7)" in sentence for sentence in warnings(found))
    assert any("at the capacity of 2 req/s the requests arrive at 4 req/s in fact" in one for one in warnings(found))
    assert without_capacity(found) == ""


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ((), "there is no SLO to keep; give the limits"),
        (("slo.lateness_s=0",), "slo.lateness_s limits no request, as none has a deadline; give them some by trace."),
        (("slo.ttft=1",), "did you mean 'slo.ttft_s'?"),
        (("slo.classes=[{tenant: chat, ttft_s: 1}]",), "slo.classes names tenant chat, and no request of the trace is"),
        (("slo.ttft_s=1", "scheduler=vllm_v1,sarathy"), "did you mean 'sarathi'?"),
        (("slo.ttft_s=1", "scheduler=vllm_v1,vllm_v1"), "scheduler=vllm_v1 is given twice"),
        (("slo.ttft_s=1", "trace.arrival=closed_loop"), "trace.arrival=closed_loop has no rate"),
        (("slo.ttft_s=1", "trace.arrival=all_at_once"), "trace.arrival=all_at_once has no rate"),
        (("slo.ttft_s=1", "trace.tenants=[{name: a}, {name: b, rate: 2}]"), "trace.tenants[1].rate=2 does not follow"),
        (("slo.ttft_s=1", "trace.tenants=[{name: a, arrival: closed_loop}]"), "arrival=closed_loop does not follow"),
        (("slo.ttft_s=1", "trace.num_requests=1"), "has 1 request, which comes at no rate; give more"),
        (("slo.ttft_s=1", "trace.rate=1,2"), "trace.rate has several values"),
        (("slo.ttft_s=1", "trace.seed=3", "seed=0,1"), "copies are no replicates"),
        (("slo.ttft_s=1", "trace.rate=2e9"), "trace.rate is 2000000000.0; it must be above 0, up to 1e9 per second"),
        (("slo.ttft_s=1", "slo.attainment=1"), "slo.attainment is 1.0; it must be above 0 and below 1, as 0.99"),
        (("slo.ttft_s=1", "report.warmup_s=10"), "report.warmup_s=10 would leave out more of the trace the higher the"),
        (("slo.ttft_s=1", "seed=0,0"), "has one twice"),
        (("slo.ttft_s=1", "seed=a"), "seed is 'a'; it must be whole numbers"),
        (("slo.ttft_s=1", "hydra.run.dir=x"), "leave it out"),
        (("slo.ttft_s=1", "overwrite=true"), "a search goes on in its folder; leave it out"),
        (("slo.ttft_s=1", "++overwrite=true"), "a search goes on in its folder; leave it out"),
        (("slo.ttft_s=1", "vllm_v1"), "expected key=value"),
        (("slo.ttft_s=1", "--tolerance", "0"), "tolerance is 0.0; it must be from 0.001 to 0.5"),
        (("slo.ttft_s=1", "--jobs", "0"), "jobs is 0; it must be at least 1"),
        (("slo.ttft_s=1", "trace.transforms=[{name: arrivals, arrival: poisson, rate: 3}]"), "trace.rate does not"),
        (("slo.ttft_s=1", "scheduler.queue_order={_target_: no.such.Order}"), "no.such.Order cannot be imported"),
    ],
)
def test_a_mistake_is_one_line(more: tuple[str, ...], text: str, tmp_path: Path, say: Say) -> None:
    said: Said = say("capacity", *TINY, *more, "--out", str(tmp_path / "out"))
    assert text in said.error()


def test_a_class_that_fails_is_named_without_a_folder_that_is_not_kept(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "class Order(FCFS):\n    def head(self, now_ns): return 1 / 0\n"
    own = "from testbed.policies.queue_order import FCFS\n" + own
    (tmp_path / "dividing_order.py").write_text(own)
    monkeypatch.syspath_prepend(str(tmp_path))
    order = "scheduler.queue_order={_target_: dividing_order.Order}"
    error = say("capacity", *TINY, *SHORT, "slo.ttft_s=1", order, "--out", str(tmp_path / "c")).error()
    assert "dividing_order.py:3: ZeroDivisionError" in error
    assert "testbed-capacity-" not in error


def test_the_real_engine_is_searched(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = capacity_of(tmp_path, *TINY, *SHORT, *REAL, "slo.e2e_s=30", "trace.rate=0.5", "slo.attainment=0.5")
    assert found.capacity > 0
    assert not found.arm.is_simulated


def test_a_class_or_file_that_changed_is_another_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    order = tmp_path / "own_order.py"
    order.write_text("from testbed.policies.queue_order import FCFS\n\n\nclass Order(FCFS): ...\n")
    rows = [{"arrival_time": i / 25, "prompt_tokens": 1, "output_tokens": 1} for i in range(100)]
    file = write_rows(tmp_path / "t.jsonl", rows)
    words = (*ONE_TOKEN[:6], "trace=jsonl", f"trace.path={file}", "scheduler.queue_order={_target_: own_order.Order}",
             "slo.ttft_s=0.05")  # fmt: skip
    find_capacity(*words, folder=tmp_path / "a")
    for changed, text in ((order, "the class file own_order.py changed"), (file, f"the file {file} changed")):
        before = changed.read_text()
        changed.write_text(before + ("# other\n" if changed is order else before.splitlines()[-1].replace("r99", "r")))
        monkeypatch.delitem(sys.modules, "own_order")  # as in another process
        with pytest.raises(RunFolderError, match=re.escape(text)):
            find_capacity(*words, folder=tmp_path / "a")
        changed.write_text(before)
