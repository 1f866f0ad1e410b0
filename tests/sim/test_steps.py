"""One engine in simulated time: every step is planned, priced and recorded by itself, at the instants it should be."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sim.backend import SimBackend
from sim.driver import run
from testbed.blocks.config import KVRules
from testbed.core.limits import Limits
from testbed.core.plan import BlockedBy
from testbed.core.request import Request, SamplingParams
from testbed.core.serve import serve
from testbed.records.recorder import RunRecorder
from testbed.records.recorders import Recorders
from tests.properties.policies import COMPOSITIONS
from tests.properties.setups import VOCAB_SIZE, Setup, presets, random_setup
from tests.sim.kit import constant
from tests.sim.worlds import STEP_NS, Log, Sessions, drive, expect_instants, price, world

ANY = list(HealthCheck)
ROOMY = Setup(limits=Limits(4, 64, 100, 0, 1), block_size=4, num_blocks=40)


def go(setup: Setup, seed: int) -> Log:
    """The random world of `seed`, with what it costs."""
    return drive(setup.scheduler(), Sessions(*world(seed)), price(random.Random(seed)), seed)


def served(setup: Setup, *requests: Request) -> Log:
    return drive(setup.scheduler(), Sessions(list(requests), [], {}), constant(STEP_NS))


def forced(name: str, prompt: list[int], output: list[int], arrival_ns: int = 0) -> Request:
    return Request(name, prompt, arrival_ns=arrival_ns, forced_output=output)


# --- random worlds ---


def expect_all_in_order(setup: Setup, seed: int) -> None:
    log = go(setup, seed)
    arrivals, aborts, _ = world(seed)
    expect_instants(log, arrivals, aborts)
    cost = price(random.Random(seed))
    for step in log.views:
        assert step.spans == cost.price(step.plan.shape)
        assert step.end_ns - step.plan_ns == max(1, step.spans.total_ns)
    again = go(setup, seed)
    assert again.events == log.events, (setup, seed)
    assert again.steps == log.steps, (setup, seed)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@settings(max_examples=60, deadline=None, suppress_health_check=ANY)
@given(seed=st.integers(0, 2**32))
@example(1795289352146)  # a member of a group whose others have ended stands at another level than it would join
@example(4784)  # keys collide where a block was to revive the entries of blocks that newer ones replaced
@example(25608291)  # beams that share an empty block ahead of a prefix that one of them alone has
@example(1795290537974)  # a chunk that was taken back counts in a swap: its blocks move, though nothing is computed
def test_each_step_lasts_what_it_costs_and_events_are_seen_at_its_end(composition: str, seed: int) -> None:
    expect_all_in_order(random_setup(random.Random(seed), composition), seed)


@pytest.mark.parametrize("preset", presets())
@settings(max_examples=20, deadline=None, suppress_health_check=ANY)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(8, 40), caching=st.booleans())
def test_so_it_is_for_every_preset(preset: str, seed: int, num_blocks: int, caching: bool) -> None:
    expect_all_in_order(Setup(**presets()[preset], num_blocks=num_blocks, caching=caching), seed)


@pytest.mark.parametrize("seed", [1795290524816, 1795290531572, 1795290533648, 1795290534140])
def test_prompts_that_take_blocks_from_each_other_for_ever_are_named(seed: int) -> None:
    """Rules that spare nobody, small chunks and a pool too small for two prompts: no plan is empty, none leads on."""
    assert "get nowhere" in str(go(random_setup(random.Random(seed), "unified"), seed).events[-1])


# --- by hand ---


def test_each_token_is_a_step_until_the_longest_output_ends() -> None:
    log = served(ROOMY, forced("a", [1] * 4, [2] * 30), forced("b", [3] * 4, [4] * 40))
    assert [step.plan.shape.num_decodes for step in log.views] == [0] + [2] * 29 + [1] * 10
    assert [step.end_ns for step in log.views] == [(i + 1) * STEP_NS for i in range(40)]
    assert [event[0::4] for event in log.events[2:]] == [("a", 30 * STEP_NS), ("b", 40 * STEP_NS)]


@pytest.mark.parametrize("composition", ["unified", "decode_first"])
def test_the_chunks_of_a_long_prompt_fill_the_budget(composition: str) -> None:
    """Budget 8: chunks of 8, and of 7 beside a decode."""
    setup = replace(ROOMY, composition=composition, limits=Limits(4, 8, 200, 0, 1), num_blocks=100)
    alone = served(setup, forced("long", list(range(100)), [1]))
    assert [step.plan.shape.num_prefill_tokens for step in alone.views] == [8] * 12 + [4]
    beside = served(setup, forced("a", [1] * 4, [2] * 40), forced("long", list(range(100)), [1], 1))
    assert [step.plan.shape.prefills[0].num_tokens for step in beside.views[1:15]] == [7] * 14
    assert [step.plan.shape.prefills[0].start for step in beside.views[1:15]] == list(range(0, 98, 7))


def test_a_recomputed_sequence_in_chunks_of_one_token_is_priced_as_prefill_and_then_as_decode() -> None:
    """Within the prompt such a chunk is a prefill, beyond it a decode. A world that was found at random."""
    arrivals = {"r7": 276_784, "r2": 9_850_979, "r6": 20_680_378, "r0": 22_045_607}
    known = {request.request_id: request for request in world(700153)[0]}
    requests = [known[name].replace(arrival_ns=instant) for name, instant in sorted(arrivals.items(), reverse=True)]
    setup = random_setup(random.Random(700153))
    log = drive(setup.scheduler(), Sessions(requests, [], {}), price(random.Random(700153)), 700153)
    assert any(step.plan.preempted for step in log.views)
    lengths = {request.request_id: len(request.prompt_token_ids) for request in requests}
    computed = dict.fromkeys(lengths, 0)
    for step, (decided, *_) in zip(log.views, log.steps, strict=True):
        assert isinstance(decided, dict)
        for preempted in step.plan.preempted:
            computed[preempted.request_id] = 0
        for admission in step.plan.admitted:
            computed[admission.request_id] = admission.num_cached_tokens
        starts = {name: computed[name] for name in decided["scheduled"]}
        num_decodes = sum(count == 1 and starts[name] >= lengths[name] for name, count in decided["scheduled"].items())
        assert step.plan.shape.num_decodes == num_decodes, step.plan.step
        for name, count in decided["scheduled"].items():
            computed[name] += count


@pytest.mark.parametrize("num_blocks", range(28, 40))
def test_chunks_stop_where_blocks_run_short(num_blocks: int) -> None:
    setup = replace(ROOMY, limits=Limits(4, 8, 200, 0, 1), num_blocks=num_blocks)
    log = served(setup, forced("a", [1] * 4, [2] * 60), forced("long", list(range(100)), [1] * 9, 1))
    assert {event[0] for event in log.events[2:]} == {"a", "long"}
    together = -(-108 // 4) + -(-(4 + 15 + 8) // 4)  # blocks of both when the long one ends, in the 24th step
    assert any(step.plan.preempted for step in log.views) == (num_blocks < together), "only where they cannot both stay"


def test_an_arrival_in_a_step_is_seen_at_its_end() -> None:
    late = forced("late", [5] * 4, [6] * 3, arrival_ns=20 * STEP_NS + 1)
    log = served(ROOMY, forced("a", [1] * 4, [2] * 60), late)
    assert ("arrived", "late", 21 * STEP_NS, 21) in log.events
    assert log.views[21].plan.admitted[0].request_id == "late"
    punctual = served(ROOMY, forced("a", [1] * 4, [2] * 60), late.replace(arrival_ns=20 * STEP_NS))
    assert ("arrived", "late", 20 * STEP_NS, 20) in punctual.events, "what comes with the end of a step is seen there"


def test_an_abort_in_a_step_is_seen_at_its_end_and_its_session_goes_on_from_there() -> None:
    turns = {"a": forced("a+", [7] * 4, [1], 5), "b": forced("b+", [8] * 4, [1])}
    inbox = Sessions([forced("a", [1] * 4, [2] * 60), forced("b", [3] * 4, [2] * 9)], [(3 * STEP_NS + 1, "a")], turns)
    log = drive(ROOMY.scheduler(), inbox, constant(STEP_NS))
    assert ("aborted", "a", 4 * STEP_NS, 4) in log.events
    assert ("arrived", "a+", 5 * STEP_NS, 5) in log.events, "5 ns after the abort, a step was under way"
    assert ("arrived", "b+", 9 * STEP_NS, 9) in log.events, "with no time to think, in the plan after the end"


def test_an_engine_with_nothing_to_do_waits_for_the_next_arrival() -> None:
    log = served(ROOMY, forced("a", [1] * 4, [2] * 2, 7), forced("b", [1] * 4, [2], 50 * STEP_NS + 3))
    assert [step.plan_ns for step in log.views] == [7, 7 + STEP_NS, 50 * STEP_NS + 3]


def test_a_cached_prefix_that_grows_lets_the_head_in_while_the_other_writes() -> None:
    """The head waits for blocks; what is decoded is what it asks for, so that it needs fewer of them step by step."""
    text = [(7 * i) % VOCAB_SIZE for i in range(60)]
    rules = KVRules(full_length_must_fit=True, hits_visible="allocation", watermark_when_idle=False)
    setup = replace(ROOMY, num_blocks=11, rules=rules)
    log = served(setup, forced("writer", text[:6], text[6:40]), forced("reader", text[:42], [3] * 2, arrival_ns=1))
    admitted = [(step.plan.step, one.num_cached_tokens) for step in log.views for one in step.plan.admitted[:1]]
    assert admitted == [(0, 0), (2, 8), (34, 36)], "while the other wrote; and again, for it was preempted"
    assert log.views[1].plan.blocked_by is BlockedBy.KV_BLOCKS


@pytest.mark.parametrize("num_blocks", range(18, 26))
@pytest.mark.parametrize("composition", ["unified", "decode_first", "prefill_first"])
def test_what_keeps_the_head_out_is_told_step_by_step(composition: str, num_blocks: int) -> None:
    """First the number of sequences does, and when blocks run short they do; unified asks for the number alone."""
    setup = replace(ROOMY, composition=composition, num_blocks=num_blocks, limits=Limits(2, 64, 100, 0, 1))
    running = [forced(f"r{i}", [i + 1] * 5, [2] * 30) for i in range(2)]
    log = served(setup, *running, forced("head", [9] * 20, [1] * 3))
    expected: list[BlockedBy | None] = []
    for index in range(30):
        num_tokens = 5 + index - (composition == "prefill_first" and index > 0)  # looks before the running ones grow
        is_short = num_blocks - 2 * -(-num_tokens // 4) < 20 // 4
        expected.append(BlockedBy.KV_BLOCKS if is_short and composition != "unified" else BlockedBy.MAX_NUM_SEQS)
    assert [step.plan.blocked_by for step in log.views] == [*expected, None, None, None]


@pytest.mark.parametrize("composition", ["unified", "decode_first"])
def test_a_head_that_shares_a_prompt_in_chunks_hits_no_more_than_is_computed(composition: str) -> None:
    """Chunks below the budget leave it to others, whose hit grows with what is computed."""
    text = [(7 * i) % VOCAB_SIZE for i in range(100)]
    hits = set()
    for num_blocks in range(20, 60, 3):
        setup = Setup(
            composition=composition, limits=Limits(4, 64, 300, 4, 1), num_blocks=num_blocks,
            rules=KVRules(full_length_must_fit=True),
        )  # fmt: skip
        log = served(setup, forced("w", text[:80], [1] * 8), forced("r", text[:76], [3] * 2, arrival_ns=1))
        computed = 0
        for step, (decided, *_) in zip(log.views, log.steps, strict=True):
            assert isinstance(decided, dict)
            for one in step.plan.admitted:
                if one.request_id == "r":
                    assert one.num_cached_tokens <= computed
                    hits.add(one.num_cached_tokens)
            computed += decided["scheduled"].get("w", 0)
    assert len(hits) > 1, "it came in at different times"


# --- the files ---


def files_of(setup: Setup, inbox: Sessions, seed: int, folder: Path) -> tuple[Log, Any, Any]:
    """The log of a run, its requests and its steps as their files have them."""
    folder.mkdir()
    recorder, log = RunRecorder(folder), Log()
    backend = SimBackend(price(random.Random(seed)), seed=seed, vocab_size=VOCAB_SIZE)
    run(serve(inbox, setup.scheduler(), Recorders(recorder, log)), backend)
    recorder.close()
    return log, *(pq.read_table(folder / f"{kind}.parquet").to_pylist() for kind in ("requests", "steps"))


def expect_files_say(log: Log, requests: Any, steps: Any) -> None:
    assert len(steps) == len(log.views)
    for row, step, (_, _, _, digest, emitted, *_) in zip(steps, log.views, log.steps, strict=True):
        shape = step.plan.shape
        assert (row["step"], row["start_ns"], row["end_ns"]) == (step.plan.step, step.plan_ns, step.end_ns)
        assert (row["num_decodes"], row["num_prefill_tokens"]) == (shape.num_decodes, shape.num_prefill_tokens)
        assert (row["digest"], row["num_emitted"]) == (digest, len(emitted))  # type: ignore[arg-type]
        assert tuple(row[name] for name in step.spans.FIELDS) == step.spans.values()
    instants: dict[str, list[int]] = {}
    for step, (_, _, _, _, emitted, *_) in zip(log.views, log.steps, strict=True):
        for name in dict.fromkeys(emitted):  # type: ignore[call-overload]
            instants.setdefault(name, []).append(step.end_ns)
    ends = {event[0]: event for event in log.events if event[0] not in ("arrived", "aborted")}
    assert [row["request_id"] for row in requests] == list(ends), "in the order of their ends"
    for row in requests:
        assert row["token_ns"] == instants.get(row["request_id"], []), row["request_id"]
        assert (row["finish_reason"], row["finish_ns"]) == (ends[row["request_id"]][1], ends[row["request_id"]][4])


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_the_files_of_a_run_say_what_happened(composition: str, tmp_path: Path) -> None:
    """Row by row; groups of sequences too, and an abort."""
    for seed in range(6):
        rng = random.Random(seed)
        setup = replace(ROOMY, composition=composition, num_blocks=rng.choice((30, 60, 200)), num_cpu_blocks=40)
        requests = [
            forced(
                f"r{i}", [i] * rng.randint(1, 30), [2] * rng.randint(1, 60), rng.randrange(90) * STEP_NS
            ).replace(sampling=SamplingParams(n=rng.choice((1, 1, 1, 2))))
            for i in range(8)
        ]  # fmt: skip
        inbox = Sessions(requests, [(40 * STEP_NS, "r0")], {})
        expect_files_say(*files_of(setup, inbox, seed, tmp_path / f"{seed}"))


def test_the_files_of_a_long_run_are_whole(tmp_path: Path) -> None:
    """More steps and requests than are written at a time."""
    num = RunRecorder.FLUSH_REQUESTS * 2 + 7
    requests = [forced(f"r{i}", [i % 7] * 3, [2] * 8, 9 * i * STEP_NS) for i in range(num)]
    log, rows, steps = files_of(ROOMY, Sessions(requests, [], {}), 0, tmp_path / "long")
    assert len(steps) > RunRecorder.FLUSH_ROWS
    expect_files_say(log, rows, steps)
