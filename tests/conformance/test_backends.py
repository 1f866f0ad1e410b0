"""What every backend promises to the core, each driven by its own driver with the same scheduler and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from testbed.core.outcome import Spans
from testbed.core.plan import BatchPlan, BatchShape, Preemption, PreemptionMode
from testbed.made_rows import MadeRows
from testbed.traces.generators import LengthConfig, SyntheticConfig, generate
from testbed.traces.inbox import to_request
from testbed.traces.schema import Trace
from tests.conformance.harness import BACKENDS, VOCAB_SIZE, RealRanks, Seen, Simulated, core

MARKS: dict[str, list[pytest.MarkDecorator]] = {
    "real-cpu": [pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")],
    "real-cpu-2-ranks": [pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")],
    "real-cuda": [pytest.mark.gpu],
}
COMPOSITIONS = ("prefill_first", "decode_first", "unified", "vllm_v1")
LENGTHS = LengthConfig("uniform", min_tokens=2, max_tokens=26)
AT_ONCE = SyntheticConfig(
    num_requests=12, arrival="all_at_once", prompt=LENGTHS, output=LENGTHS, num_system_prompts=2,
    system_prompt_tokens=14,
)  # fmt: skip
ONE_USER = SyntheticConfig(
    num_requests=7, min_turns=7, max_turns=7, think_time_s=0.002,
    prompt=LengthConfig("uniform", min_tokens=2, max_tokens=12),
    output=LengthConfig("uniform", min_tokens=2, max_tokens=9),
)  # fmt: skip
TRACES = {"all at once": generate(AT_ONCE), "one user": generate(ONE_USER)}
TIGHT = 20


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, [])) for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Iterator[Simulated]:
    made = BACKENDS[request.param]()
    yield made
    if made.is_real:
        made.backend.close()


def skip_unless_tried(backend: Simulated, composition: str) -> None:
    if backend.compositions is not None and composition not in backend.compositions:
        pytest.skip(f"slow: tried under {', '.join(backend.compositions)} only")


@pytest.fixture(scope="module", params=COMPOSITIONS)
def served(backend: Simulated, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A run with prefix hits and preemptions."""
    skip_unless_tried(backend, request.param)
    folder = tmp_path_factory.mktemp("tape")
    seen = backend.serve(TRACES["all at once"], core(request.param, num_blocks=TIGHT), folder)
    assert any(step.plan.preempted for step in seen.steps), "the pool is not tight enough for this suite"
    assert any(seen.cached.values()), "no prefix was hit"
    return seen


def test_the_run_ends_and_every_request_with_it(served: Seen) -> None:
    assert set(served.ended) == {row.request_id for row in TRACES["all at once"]}
    assert {item.reason.value for item in served.ended.values()} == {"length"}


def test_instants_increase_and_a_step_lasts_at_least_a_nanosecond(served: Seen) -> None:
    for step in served.steps:
        assert type(step.plan_ns) is type(step.end_ns) is int
        assert step.end_ns >= step.plan_ns + 1
    for before, after in pairwise(served.steps):
        assert after.plan_ns >= before.end_ns
        assert after.plan.step == before.plan.step + 1


def test_rows_can_be_read_from_start_on_and_agree_with_the_shape(served: Seen) -> None:
    for step, rows in zip(served.steps, served.rows, strict=True):
        shape = step.plan.shape
        assert sum(row.num_tokens for row in rows) == shape.num_tokens
        assert sum(row.samples for row in rows) == shape.num_samples
        for row in rows:
            assert len(row.tokens) == row.num_tokens
            assert all(0 <= token < VOCAB_SIZE for token in row.tokens)


def test_no_outcomes_when_every_row_is_forced(served: Seen) -> None:
    assert all(row.forced for rows in served.rows for row in rows)
    assert all(step.result.outcomes is None for step in served.steps)


def test_forced_outputs_are_emitted_exactly(served: Seen) -> None:
    for row in TRACES["all at once"]:
        forced = to_request(row, VOCAB_SIZE).forced_output
        assert forced is not None
        assert list(served.ended[row.request_id].output_token_ids) == list(forced)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_with_a_plan_ahead_all_gets_done_too(backend: Simulated, composition: str, tmp_path: Path) -> None:
    """Ranks take one step at a time, and are asked for no other (experiments/configuration/on_device.py)."""
    if isinstance(backend, RealRanks):
        pytest.skip("one step at a time")
    trace = TRACES["all at once"]
    seen = backend.serve(trace, core(composition, num_blocks=TIGHT, plans=2), tmp_path)
    for row in trace:
        forced = to_request(row, VOCAB_SIZE).forced_output
        assert forced is not None
        assert list(seen.ended[row.request_id].output_token_ids) == list(forced)
    overlaps = [after.plan_ns < before.end_ns for before, after in pairwise(seen.steps)]
    assert sum(overlaps) > len(overlaps) / 2, "a step is planned while the one before it runs"


def test_spans_have_one_schema_and_fit_into_their_step(served: Seen, backend: Simulated) -> None:
    for step in served.steps:
        spans = step.result.spans
        assert type(spans) is Spans
        assert all(type(part) is int and part >= 0 for part in spans)
        duration_ns = step.end_ns - step.plan_ns
        assert sum(spans) <= duration_ns if backend.is_real else max(1, sum(spans)) == duration_ns
    assert sum(step.result.spans.forward_ns for step in served.steps) > 0


def test_every_part_of_a_real_step_is_timed(served: Seen, backend: Simulated) -> None:
    if not backend.is_real:
        pytest.skip("a simulator has the parts that its prices have")
    for step in served.steps[1:]:
        spans, shape = step.result.spans, step.plan.shape
        assert spans.schedule_ns > 0
        if shape.num_tokens:
            assert min(spans.prepare_ns, spans.forward_ns) > 0
        assert (spans.sample_ns > 0) >= (shape.num_samples > 0)


# --- plans made by hand ---


def shape(**counts: int) -> BatchShape:
    return BatchShape(0, 0, (), 0, **counts)


def plan(step: int, shape: BatchShape, **fields: tuple[object, ...]) -> BatchPlan:
    return BatchPlan(step, shape, MadeRows(()), **fields)  # type: ignore[arg-type]


def test_a_plan_that_only_preempts_takes_time(backend: Simulated) -> None:
    victim = Preemption(3, "r3", PreemptionMode.RECOMPUTE, 17)
    resumes = backend.execute([plan(step, shape(), preempted=(victim,)) for step in range(3)])
    instants = [0, *(resume.now_ns for resume in resumes)]
    assert all(after >= before + 1 for before, after in pairwise(instants))
    for resume in resumes:
        assert resume.result is not None
        assert resume.result.outcomes is None
        assert all(part >= 0 for part in resume.result.spans)


MOVES = {
    "swap_out": (((1, 0), (2, 1)), "num_blocks_swapped_out"),
    "swap_in": (((0, 5), (1, 6)), "num_blocks_swapped_in"),
    "copies": (((5, 7), (6, 8)), "num_blocks_copied"),
}


@pytest.mark.parametrize("moves", [("swap_out",), ("swap_in",), ("copies",), tuple(MOVES)], ids=" ".join)
def test_block_moves_are_executed_and_take_time(backend: Simulated, moves: tuple[str, ...]) -> None:
    counts = {MOVES[name][1]: len(MOVES[name][0]) for name in moves}
    (resume,) = backend.execute([plan(0, shape(**counts), **{name: MOVES[name][0] for name in moves})])
    assert resume.now_ns >= 1
    assert resume.result is not None
    assert resume.result.end_ns == resume.now_ns


def test_moved_blocks_hold_what_was_in_them(backend: Simulated) -> None:
    if not backend.is_real:
        pytest.skip("a simulator moves nothing")
    gpu = backend.backend.cache.gpu
    before = [[part[1].clone().fill_(0.5) for part in layer] for layer in gpu]
    for layer in gpu:
        for part in layer:
            part[1].fill_(0.5)
            part[8].zero_()
    moves = {"swap_out": ((1, 0),), "swap_in": ((0, 5),), "copies": ((5, 8),)}
    counts = shape(num_blocks_swapped_out=1, num_blocks_swapped_in=1, num_blocks_copied=1)
    backend.execute([plan(0, counts, **moves)])
    for layer, expected in zip(gpu, before, strict=True):
        for part, value in zip(layer, expected, strict=True):
            assert (part[8] == value).all()


# --- one decision for all ---


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize(("trace", "num_blocks"), [("all at once", 60), ("all at once", TIGHT), ("one user", 60)])
def test_where_time_cannot_matter_every_backend_sees_the_same_decisions(
    backend: Simulated, tmp_path: Path, composition: str, caching: bool, trace: str, num_blocks: int
) -> None:
    skip_unless_tried(backend, composition)

    def run(on: Simulated) -> Seen:
        return on.serve(TRACES[trace], core(composition, num_blocks=num_blocks, caching=caching), tmp_path)

    ours, reference = run(backend), run(reference_backend())
    assert [step.digest for step in ours.steps] == [step.digest for step in reference.steps]
    assert [step.plan.num_scheduled for step in ours.steps] == [step.plan.num_scheduled for step in reference.steps]
    assert ours.cached == reference.cached
    assert any(ours.cached.values()) is caching
    assert lengths(ours) == lengths(reference) == expected_lengths(TRACES[trace])
    assert ours.rows == reference.rows, "the same tokens at the same positions in the same blocks"


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_forced_lengths_are_decided_on_as_forced_tokens_are(
    backend: Simulated, tmp_path: Path, composition: str
) -> None:
    """A real engine's own tokens come back, preempted sequences included: all that is decided stays."""
    skip_unless_tried(backend, composition)
    trace = TRACES["all at once"]
    ours = backend.serve(trace, core(composition, num_blocks=TIGHT, caching=False), tmp_path, "lengths")
    reference = reference_backend().serve(trace, core(composition, num_blocks=TIGHT, caching=False), tmp_path)
    assert any(step.plan.preempted for step in ours.steps)
    assert [step.digest for step in ours.steps] == [step.digest for step in reference.steps]
    assert lengths(ours) == expected_lengths(trace)
    tokens = {name: list(item.output_token_ids) for name, item in ours.ended.items()}
    recorded = {name: list(item.output_token_ids) for name, item in reference.ended.items()}
    assert (tokens != recorded) is backend.is_real


def lengths(seen: Seen) -> dict[str, tuple[int, int]]:
    return {name: (len(item.request.prompt_token_ids), item.num_output_tokens) for name, item in seen.ended.items()}


def expected_lengths(trace: Trace) -> dict[str, tuple[int, int | None]]:
    return {row.request_id: (row.num_prompt_tokens, row.num_output_tokens) for row in trace}


def reference_backend() -> Simulated:
    make: Callable[[], Simulated] = BACKENDS["constant"]
    return make()


class Free:
    """A user's cost model that prices everything at nothing."""

    def price(self, shape: BatchShape) -> Spans:
        return Spans()


def test_a_price_of_nothing_still_lasts_a_nanosecond(tmp_path: Path) -> None:
    free = Simulated(Free())
    seen = free.serve(TRACES["all at once"], core("unified", num_blocks=TIGHT), tmp_path)
    assert [step.end_ns - step.plan_ns for step in seen.steps] == [1] * len(seen.steps)
    (resume,) = free.execute([plan(0, shape(), preempted=(Preemption(3, "r3", PreemptionMode.RECOMPUTE, 17),))])
    assert resume.now_ns == 1
