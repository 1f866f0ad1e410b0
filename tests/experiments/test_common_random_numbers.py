"""Common random numbers: what chance decides is the same under every policy, and independent by purpose."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2, pearsonr

from testbed.core.commands import Arrive
from testbed.core.outcome import Finished, FinishReason
from testbed.core.request import Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.policies.orders import random_order
from testbed.seeds import request_seed
from testbed.seeds import seeded as with_seed
from testbed.streams import draw
from testbed.traces.draws import stream
from testbed.traces.generators import LengthConfig, SyntheticConfig, generate
from testbed.traces.inbox import TraceInbox
from testbed.traces.schema import Trace
from tests.experiments.kit import SHORT, TINY, config_of
from tests.experiments.streams import Observer, observe
from tests.source_tree import FILES, relative, tree_of

SESSIONS: dict[str, Any] = {
    "trace__num_requests": 24, "trace__min_turns": 1, "trace__max_turns": 4, "trace__think_time_s": 0.01,
    "trace__num_tenants": 3, "trace__num_system_prompts": 2, "trace__system_prompt_tokens": 9, "trace__rate": 300.0,
}  # fmt: skip
ARMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "baseline": ((), {}),
    "another preset": (("scheduler=vllm_v0", "scheduler.max_num_seqs=4"), {}),
    "another composition": (("scheduler=static", "scheduler.max_num_seqs=3"), {}),
    "another queue order": ((), {"scheduler__queue_order": "lcfs"}),
    "another block size": (("cache.block_size=16", "cache.num_gpu_blocks=16"), {}),
    "no prefix caching": ((), {"cache__prefix_caching": False}),
    "little memory": ((), {"cache__num_gpu_blocks": 24}),
    "another cost model": (("cost=constant", "cost.step_s=0.02"), {}),
    "another device": (("device=a100",), {}),
}
SHARED = ("token_ids", "output_ids", "tenants", "thinks_ns", "open_arrivals_ns", "sampling_seeds")


def observed(arm: str, tmp_path: Path, **more: Any) -> Observer:
    overrides, dotted = ARMS[arm]
    return observe(config_of((*TINY, *SHORT, *overrides), **{**SESSIONS, **dotted, **more}), tmp_path / arm)


# --- the same for every policy ---


def test_arms_differ_in_what_they_decide_and_share_what_chance_decided(tmp_path: Path) -> None:
    seen = {arm: observed(arm, tmp_path) for arm in ARMS}
    base = seen["baseline"]
    assert len(base.token_ids) == 24
    for arm, other in seen.items():
        assert other.fingerprint == base.fingerprint, arm
        for what in SHARED:
            assert getattr(other, what) == getattr(base, what), f"{arm}: {what} differ"
    assert len({other.digest for other in seen.values()}) > 5, "the arms are all alike"
    orders = {tuple(other.arrivals) for other in seen.values()}
    assert len(orders) > 2, "sessions close the loop: requests come in another order under another policy"


def test_another_seed_changes_all_of_it(tmp_path: Path) -> None:
    base, other = observed("baseline", tmp_path), observed("baseline", tmp_path / "other", seed=1)
    for what in ("token_ids", "output_ids", "thinks_ns", "open_arrivals_ns"):
        assert getattr(base, what) != getattr(other, what), what


def test_a_random_queue_order_ranks_requests_alike_under_every_policy(tmp_path: Path) -> None:
    """In a closed loop they come in another order, and sequences are numbered as they come."""
    arms = ("baseline", "another composition", "another cost model")
    seen = [observed(arm, tmp_path, scheduler__queue_order="random") for arm in arms]
    assert len({tuple(other.arrivals) for other in seen}) > 1
    assert seen[0].ranks == seen[1].ranks == seen[2].ranks
    assert len(set(seen[0].ranks.values())) == 24


def test_a_noisy_oracle_says_the_same_under_every_policy(tmp_path: Path) -> None:
    oracle = {"_target_": "testbed.policies.oracle.Noisy", "sigma": 0.8}
    arms = ("baseline", "another composition", "another cost model")
    seen = [observed(arm, tmp_path, scheduler__oracle=oracle, scheduler__queue_order="srpt") for arm in arms]
    assert seen[0].predictions == seen[1].predictions == seen[2].predictions
    assert len(seen[0].predictions) == 24


def test_requests_that_sample_have_seeds_of_their_own_under_every_policy(tmp_path: Path) -> None:
    drawn = {"sampling__temperature": 0.7}
    seen = [observed(arm, tmp_path, **drawn) for arm in ("baseline", "another composition", "another cost model")]
    assert seen[0].sampling_seeds == seen[1].sampling_seeds == seen[2].sampling_seeds
    assert seen[0].sampling_seeds == {name: request_seed(0, name) for name in seen[0].token_ids}
    given = observed("baseline", tmp_path / "given", **drawn, sampling__seed=5)
    assert set(given.sampling_seeds.values()) == {5}
    greedy = observed("baseline", tmp_path / "greedy")
    assert set(greedy.sampling_seeds.values()) == {None}


def test_beams_part_alike_under_every_policy(tmp_path: Path) -> None:
    beams = {"sampling__beam_width": 3, "cache__num_cpu_blocks": 64, "cache__num_gpu_blocks": 200}
    arms = ("baseline", "another composition", "another cost model")
    seen = [observed(arm, tmp_path, **beams) for arm in arms]
    assert len({tuple(other.arrivals) for other in seen}) > 1
    assert seen[0].outputs == seen[1].outputs == seen[2].outputs


def test_a_seeded_inbox_changes_nothing_else() -> None:
    trace = generate(SyntheticConfig(num_requests=12, max_turns=3, think_time_s=0.5, rate=50.0))
    sampling = SamplingParams(temperature=1.0)
    plain, seeded = (
        TraceInbox(trace, 100, sampling),
        TraceInbox(trace, 100, sampling, lambda request: with_seed(request, 7)),
    )
    num_seen = 0
    while (now_ns := plain.next_ns()) is not None:
        assert seeded.next_ns() == now_ns
        assert seeded.is_open == plain.is_open
        events, others = plain.due(now_ns), seeded.due(now_ns)
        for event, other in zip(events, others, strict=True):
            assert isinstance(event, Arrive)
            assert isinstance(other, Arrive)
            assert unseeded(other.request) == unseeded(event.request)
            assert other.request.sampling.seed == request_seed(7, event.request.request_id)
            num_seen += 1
        plain.finished([finished(event.request) for event in events], now_ns + 9)  # type: ignore[union-attr]
        seeded.finished([finished(event.request) for event in others], now_ns + 9)  # type: ignore[union-attr]
    assert num_seen == 12


def unseeded(request: Request) -> tuple[Any, ...]:
    return (
        request.request_id, list(request.prompt_token_ids), request.arrival_ns, list(request.forced_output or ()),
        request.priority, request.tenant, request.session_id, request.turn, request.deadline_ns,
        request.sampling.temperature,
    )  # fmt: skip


def finished(request: Request) -> Finished:
    return Finished(request, FinishReason.LENGTH, "", 1, ())


# --- each purpose by itself ---

BASE: dict[str, Any] = {
    "num_requests": 300, "rate": 5.0, "min_turns": 2, "max_turns": 2, "closed_loop": True, "think_time_s": 2.0,
    "num_system_prompts": 8, "system_prompt_tokens": 7, "num_tenants": 5,
    "prompt": LengthConfig("lognormal", 50, 0.5), "output": LengthConfig("lognormal", 20, 0.5),
}  # fmt: skip
PURPOSES: dict[str, Callable[[Trace], list[Any]]] = {
    "arrivals": lambda trace: [row.arrival_ns for row in trace if not row.turn],
    "thinks": lambda trace: [row.think_ns for row in trace],
    "outputs": lambda trace: [row.num_output_tokens for row in trace],
    "tenants": lambda trace: [row.tenant for row in trace],
    "systems": lambda trace: [row.prompt[0].key for row in trace],  # type: ignore[union-attr]
    "contents": lambda trace: [row.prompt[1].key for row in trace],  # type: ignore[union-attr]
    "prompts": lambda trace: [row.num_prompt_tokens for row in trace if not row.turn],
}
CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "rate": ({"rate": 50.0}, {"arrivals"}),
    "process of arrivals": ({"arrival": "gamma", "cv": 3.0}, {"arrivals"}),
    "think time": ({"think": "constant"}, {"thinks"}),
    "output length": ({"output": LengthConfig("uniform", min_tokens=1, max_tokens=9)}, {"outputs"}),
    "prompt length": ({"prompt": LengthConfig("uniform", min_tokens=1, max_tokens=9)}, {"prompts"}),
    "popularity of system prompts": ({"system_prompt_skew": 1.5}, {"systems"}),
    "number of tenants": ({"num_tenants": 3}, {"tenants"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_purposes_distribution_leaves_the_others_alone(name: str) -> None:
    change, changed = CHANGES[name]
    before, after = generate(SyntheticConfig(**BASE), 3), generate(SyntheticConfig(**{**BASE, **change}), 3)
    differ = {purpose for purpose, of in PURPOSES.items() if of(before) != of(after)}
    assert differ == changed


# --- independence ---

NAMES = ("arrival", "prompt", "output", "turn_prompt", "turns", "think", "tenant", "system_prompt", "document", "call")
ALPHA = 1e-3  # of each test, shared among its comparisons; seeds are fixed


def test_streams_of_other_names_and_seeds_are_uncorrelated() -> None:
    """Pearson's r of 4,000 numbers; the threshold is that of ALPHA over all pairs (Bonferroni)."""
    drawn = {(seed, name): stream(seed, name).random(4000) for seed in (0, 1, 2, 1 << 32) for name in NAMES}
    pairs = list(itertools.combinations(drawn, 2))
    worst = min(pairs, key=lambda pair: pearsonr(drawn[pair[0]], drawn[pair[1]]).pvalue)
    smallest = pearsonr(drawn[worst[0]], drawn[worst[1]]).pvalue
    assert smallest > ALPHA / len(pairs), f"{worst}: p = {smallest:g} in {len(pairs)} pairs"


def test_a_streams_first_numbers_over_seeds_are_uniform() -> None:
    """Seeds are small and near each other: replication k must not look like replication k + 1. Chi-square, 64 bins."""
    sources: dict[str, Callable[[int], float]] = {
        "traces": lambda seed: float(stream(seed, "arrival").random()),
        "core": lambda seed: draw(seed, "queue_order", "r0") / 2**64,
        "core, by request": lambda number: draw(0, "queue_order", f"r{number}") / 2**64,
    }
    for name, first in sources.items():
        values = np.array([first(seed) for seed in range(6400)])
        counts = np.histogram(values, bins=64, range=(0.0, 1.0))[0]
        statistic = float(((counts - 100.0) ** 2 / 100.0).sum())
        low, high = chi2.ppf((ALPHA / 2, 1 - ALPHA / 2), 63)
        assert low < statistic < high, f"{name}: chi-square {statistic:.1f} outside [{low:.1f}, {high:.1f}]"
        correlation = pearsonr(values[:-1], values[1:])
        assert correlation.pvalue > ALPHA, f"{name}: neighbouring seeds, r = {correlation.statistic:.3f}"


def test_no_two_purposes_of_any_seed_share_a_stream() -> None:
    firsts = Counter(stream(seed, name).bit_generator.random_raw() for seed in range(300) for name in NAMES)
    assert max(firsts.values()) == 1
    names = ("queue_order", "oracle", "estimator", "sampling", "beams")
    draws = Counter(draw(seed, name, f"r{i}") for seed in range(50) for name in names for i in range(50))
    assert max(draws.values()) == 1


def test_a_draw_is_named_by_seed_purpose_and_key_and_by_nothing_else() -> None:
    assert draw(3, "oracle", "r1") == draw(3, "oracle", "r1")
    distinct = {
        draw(3, "oracle", "r1"), draw(4, "oracle", "r1"), draw(3, "queue_order", "r1"), draw(3, "oracle", "r2"),
        draw(3, "oracle", "r1", 0), draw(3, "oracle"),
    }  # fmt: skip
    assert len(distinct) == 6


# --- nothing else is random ---

FIXED = {  # by seeds of their own, of no run: resampling of an analysis; what a benchmark or a profile measures
    "sim/cost/linear.py", "sim/cost/calibration.py", "analysis/measures/statistics.py", "real/profiler/grid.py",
    "real/profiler/measure.py", "experiments/bench/offline.py", "experiments/bench/engine.py",
    "experiments/bench/simulator.py", "experiments/bench/claims.py",
}  # fmt: skip


def makes_generators(node: ast.AST) -> bool:
    """numpy.random.…, or an import of a module that makes random numbers."""
    if isinstance(node, ast.Attribute):
        value = node.value
        is_numpys = isinstance(value, ast.Attribute) and value.attr == "random" and isinstance(value.value, ast.Name)
        return is_numpys and value.value.id in ("np", "numpy") and node.attr != "Generator"
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return not {"random", "secrets", "uuid", "numpy.random"}.isdisjoint(modules)


def test_generators_are_made_in_one_place() -> None:
    """Whoever needs chance takes a named stream; torch's generator fills dummy weights, from the run's seed."""
    found = {relative(path) for path in FILES if any(makes_generators(node) for node in ast.walk(tree_of(path)))}
    assert "testbed/traces/draws.py" in found
    assert found <= {"testbed/traces/draws.py", *FIXED}, found


def test_the_ids_that_draws_go_by_are_the_requests_own() -> None:
    """A queue of random order is the same for sequences that are numbered otherwise."""
    from tests.testbed.core_kit import make_request, make_scheduler

    def order(names: list[str]) -> list[str]:
        queue = random_order(seed=3)
        scheduler: Scheduler = make_scheduler(queue=queue)
        for name in names:
            scheduler.add(make_request(name, 4))
        return [seq.request.request_id for seq in queue]

    names = [f"r{i}" for i in range(20)]
    assert order(names) == order(names[::-1]) == order(sorted(names)) != names
