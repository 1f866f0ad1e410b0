"""docs/examples/my_policies.py as docs/extending.md names it, and that docs/policies.md names every policy."""

from __future__ import annotations

import random
import re
import shlex
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from experiments import simulate
from experiments.configuration.options import options
from experiments.configuration.policies import POLICIES
from testbed.blocks.config import KVRules
from testbed.traces.schema import Span, Trace, TraceRequest
from tests.experiments.kit import TINY, Say, decisions_of, table_of, write_rows

DOCS = Path(__file__).parents[2] / "docs"
TIGHT = ("cache.num_gpu_blocks=10", "scheduler.max_num_batched_tokens=16")


def documented_commands() -> list[list[str]]:
    """The `testbed run` commands of docs/extending.md that make one run, without `testbed`."""
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("testbed run") and " -m " not in line]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The directory of the examples is the present one."""
    monkeypatch.chdir(DOCS / "examples")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    yield
    sys.modules.pop("my_policies", None)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Eight requests at once, of two tenants (the last two are `chat`): prompts of 20, 19, … tokens, outputs of 9."""
    return write_rows(
        tmp_path / "rows.jsonl",
        [
            {
                "request_id": f"r{i}",
                "arrival_time": 0,
                "prompt_tokens": 20 - i,
                "output_tokens": 9,
                "tenant": "chat" if i > 5 else "batch",
            }
            for i in range(8)
        ],
    )


class Ran:
    """A run of the eight requests, small enough for the pool of ten blocks of 4 tokens to run out."""

    def __init__(self, say: Say, rows: Path, *arguments: str) -> None:
        folder = rows.parent / "run"
        say("run", *arguments, *(key for key in (*TINY, *TIGHT) if not _names(key, arguments)), "trace=jsonl",
            f"trace.path={rows}", "record.decisions=true", f"hydra.run.dir={folder}", "overwrite=true",
        ).success()  # fmt: skip
        self.decisions = decisions_of(folder)
        table = table_of(folder)
        assert set(table["finish_reason"].to_pylist()) == {"length"}
        starts = table.sort_by("first_scheduled_ns")
        self.starts = starts["request_id"].to_pylist()

    def num_events(self, kind: str) -> int:
        return sum(len(line[kind]) for line in self.decisions)


def _names(key: str, arguments: tuple[str, ...]) -> bool:
    """Whether the arguments set this key otherwise."""
    return any(argument.partition("=")[0] == key.partition("=")[0] for argument in arguments)


@pytest.mark.parametrize("arguments", documented_commands(), ids=lambda words: words[-1].partition("=")[0])
def test_a_documented_command_runs_as_it_stands(examples: None, say: Say, tmp_path: Path, arguments: list[str]) -> None:
    say(*arguments, f"hydra.run.dir={tmp_path / 'run'}").success()


def test_an_order_that_is_a_key(examples: None, say: Say, rows: Path) -> None:
    one = "scheduler.max_num_seqs=1"
    ran = Ran(say, rows, one, "scheduler.queue_order={_target_: my_policies.shortest_prompt_first}")
    assert ran.starts == [f"r{i}" for i in reversed(range(8))]


def test_an_order_from_scratch(examples: None, say: Say, rows: Path) -> None:
    """The tenants take turns while both have requests; then the other's follow in order of arrival."""
    one = "scheduler.max_num_seqs=1"
    ran = Ran(say, rows, one, "scheduler.queue_order={_target_: my_policies.TenantsInTurn}")
    assert ran.starts == ["r0", "r6", "r1", "r7", "r2", "r3", "r4", "r5"]


def test_an_admission(examples: None, say: Say, rows: Path) -> None:
    """No step runs two of the six of one tenant."""
    roomy, cap = "cache.num_gpu_blocks=64", "scheduler.admission={_target_: my_policies.TenantCap, max_requests: 1}"
    ran = Ran(say, rows, roomy, cap)
    tenants = [["chat" if name in ("r6", "r7") else "batch" for name in line["scheduled"]] for line in ran.decisions]
    assert all(len(set(names)) == len(names) for names in tenants)
    free = Ran(say, rows, roomy)
    assert len(free.decisions) < len(ran.decisions)


def test_a_victim_and_a_mode(examples: None, say: Say, rows: Path) -> None:
    victim = "scheduler.victim={_target_: my_policies.CheapestToRecompute}"
    by_recompute = Ran(say, rows, victim, "scheduler.preemption=recompute")
    assert by_recompute.num_events("preempted") > 0
    for min_blocks, swaps in ((1, True), (1000, False)):
        mode = f"scheduler.preemption={{_target_: my_policies.SwapWhatIsLarge, min_blocks: {min_blocks}}}"
        ran = Ran(say, rows, victim, mode, "cache.num_cpu_blocks=40")
        assert (ran.num_events("swapped_out") > 0) is swaps
        assert (ran.num_events("preempted") > 0) is not swaps


def test_a_composition_that_asks_how_long_a_step_would_take(examples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with decodes stay below the limit, all but those with the least chunk; without it they do not."""
    monkeypatch.syspath_prepend(DOCS / "examples")
    unified = {"_target_": "testbed.policies.compositions.unified.Unified"}
    bounded = {"_target_": "my_policies.BoundedSteps", "max_step_ms": 4.0, "of": unified}
    for composition, is_bounded in ((unified, False), (bounded, True)):
        run = simulate({"name": "synthetic", "rate": 40}, scheduler={"composition": composition})
        mixed = run.steps[(run.steps.num_decodes > 0) & (run.steps.num_prefill_tokens > 16)]
        longest_ns = (mixed.end_ns - mixed.start_ns).max()
        assert (3.5e6 < longest_ns < 4.05e6) == is_bounded, longest_ns
        assert run.summary["num_finished"] == 200


def test_a_cost_model_on_one_of_ours_is_that_of_the_run(
    examples: None, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise it is the other one, also of ranks; with it, the run's seed draws. Its keys are checked as ours."""
    monkeypatch.syspath_prepend(DOCS / "examples")
    trace = {"num_requests": 20, "rate": 50, "seed": 0}  # the same whatever the run's seed is
    ranks = {"model": "llama3.1_8b", "device": {"name": "h100", "tensor_parallel_size": 2}}
    noisy = {"_target_": "my_policies.Noisy", "sigma": 0.0}
    assert simulate(trace, cost=noisy, **ranks).summary["ttft_s"] == simulate(trace, **ranks).summary["ttft_s"]
    drawn = [simulate(trace, cost=noisy | {"sigma": 0.3}, seed=seed).requests.tpot_s.mean() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    long = {"num_requests": 3, "prompt": {"kind": "constant", "value": 30_000}}
    fits = [simulate(long, cost=cost).manifest for cost in ({"name": "calibrated"}, noisy | {"of": "calibrated"})]
    assert fits[0]["cost_notes"] == fits[1]["cost_notes"] != [], "of step times that were not measured"
    assert fits[0]["num_extrapolated_steps"] == fits[1]["num_extrapolated_steps"] > 0
    own = ("run", *TINY, "--config-dir", "my_conf", "cost=noisy", "trace.num_requests=1")
    for more, message in (
        (("cost.of=rofline",), "cost has no option 'rofline'; did you mean 'roofline'?"),
        (("cost.of=constant", "+cost.step_s=soon"), "cost.step_s is 'soon'; it must be a number"),
        (("cost.of=constant", "+cost.stop_s=1"), "unknown key 'cost.stop_s'; did you mean 'cost.step_s'?"),
        (("cost.of=3",), "cost=3 is no name of an option"),
        (("cost.of=noisy",), "cost has no option 'noisy'; valid: roofline, tables"),
    ):
        assert message in say(*own, *more).error()


def test_an_eviction(examples: None, say: Say, tmp_path: Path) -> None:
    """4 blocks of 4 tokens. `a` (8 tokens) leaves its blocks 0 and 1, `b` (3 tokens) none. `c` needs 3 of the 4 blocks:
    two are free, one is evicted. `d`, as `a`, finds the first block if the deeper one went."""
    prompts = {"a": range(8), "b": range(20, 23), "c": range(30, 40), "d": range(8)}
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [
            {"request_id": name, "arrival_time": i, "prompt_token_ids": [*tokens], "output_tokens": 1}
            for i, (name, tokens) in enumerate(prompts.items())
        ],
    )
    ran = Ran(say, rows, "cache.num_gpu_blocks=4", "cache.eviction={_target_: my_policies.DeepestFirst}")
    assert {name: hit for line in ran.decisions for name, hit in line["cached_tokens"].items()}["d"] == 4


def test_an_admission_by_the_clock(examples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts of 40 tokens at once, and 100 tokens/s: one takes the bucket's 40, the others wait for 0.4 s each.
    A long request of another tenant keeps the engine from being idle, in which all are admitted."""
    monkeypatch.syspath_prepend(DOCS / "examples")
    rows = [{"arrival_time": 0, "prompt_tokens": 40, "output_tokens": 1, "tenant": "chat"} for _ in range(3)]
    rows.append({"arrival_time": 0, "prompt_tokens": 8, "output_tokens": 800, "tenant": "batch"})
    bucket = {"_target_": "my_policies.TenantRate", "tokens_per_s": 100, "burst": 40}
    inside = {"_target_": "testbed.policies.admission.All", "of": [bucket]}
    for admission in (bucket, inside):
        run = simulate(
            rows, scheduler={"name": "decode_first", "admission": admission, "queue_order": "lcfs"},
            cost={"name": "constant", "step_s": 0.01},
        )  # fmt: skip
        assert sorted(run.requests["first_scheduled_ns"] // 10**7) == [0, 0, 40, 80], "the last to come is first"


def test_an_eviction_that_remembers_keeps_what_comes_again_in_a_scan(
    examples: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of one block, skewed, among twice as many that come once; the same hits as 2Q over their numbers."""
    monkeypatch.syspath_prepend(DOCS / "examples")
    drawn, size = random.Random(3), 41
    weights = [1 / (rank + 1) for rank in range(150)]
    documents = [drawn.choices(range(150), weights)[0] if drawn.random() < 0.4 else 1000 + i for i in range(3000)]
    rows = [
        TraceRequest(f"r{i}", i * 10**7, (Span(document, 0, 4), Span(10**6 + i, 0, 1)), Span(2 * 10**6 + i, 0, 1))
        for i, document in enumerate(documents)
    ]
    hits = {}
    for name, eviction in (("2q", {"_target_": "my_policies.TwoQueues"}), ("lru", "lru")):
        cache = {"num_gpu_blocks": size, "block_size": 4, "watermark": 0, "eviction": eviction}
        run = simulate(
            Trace("scan", tuple(rows)), model="tiny", cost={"name": "constant", "step_s": 0.001}, cache=cache
        )
        hits[name] = int((run.requests["num_cached_tokens"] == 4).sum())
    assert hits["2q"] == hits_of_two_queues(documents, size) > 1.2 * hits["lru"]


def hits_of_two_queues(contents: list[int], size: int) -> int:
    """One block is always the request's own second one: it is not cached."""
    new: OrderedDict[int, None] = OrderedDict()
    main: OrderedDict[int, None] = OrderedDict()
    evicted: list[int] = []
    num_hits = 0
    for content in contents:
        for queue in (new, main):
            if content in queue:
                queue.move_to_end(content)
                num_hits += 1
                break
        else:
            if len(new) + len(main) == size - 1 and new and (len(new) > size // 4 or not main):
                evicted = [*evicted, new.popitem(last=False)[0]][-(size // 2) :]
            elif len(new) + len(main) == size - 1:
                main.popitem(last=False)
            (main if content in evicted else new)[content] = None
    return num_hits


def test_an_oracle(examples: None, say: Say, rows: Path) -> None:
    """Shortest output first by the oracle: `chat` before `batch` if it is said to be short, after it if long."""
    for chat, first in ((1, ["r6", "r7"]), (50, ["r0", "r1"])):
        oracle = f"scheduler.oracle={{_target_: my_policies.ByTenant, lengths: {{chat: {chat}, batch: 10}}}}"
        order = "scheduler.queue_order={_target_: testbed.policies.orders.shortest_job, by: output}"
        assert Ran(say, rows, oracle, order, "scheduler.max_num_seqs=1").starts[:2] == first
    for said in ("0", "-5", "1.5"):
        oracle = f"scheduler.oracle={{_target_: my_policies.ByTenant, lengths: {{chat: {said}, batch: 10}}}}"
        path = ("trace=jsonl", f"trace.path={rows}", f"hydra.run.dir={rows.parent / 'bad'}", "overwrite=true")
        error = say("run", *TINY, *path, oracle, order).error()
        assert f"scheduler.oracle: ByTenant predicts {said} for request " in error
        assert "a whole number of tokens, at least 1, or None" in error


def test_an_oracle_that_learns(examples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time: the first two are of no known length; of the others those of the tenant of short outputs go first,
    though they came last."""
    monkeypatch.syspath_prepend(DOCS / "examples")
    tenants = ["long", "short", "long", "long", "short", "short"]
    rows = [
        {"arrival_time": 0.5 * (i > 1), "prompt_tokens": 9, "output_tokens": {"long": 20, "short": 2}[tenant]}
        | {"request_id": f"{tenant}{i}", "tenant": tenant}
        for i, tenant in enumerate(tenants)
    ]
    run = simulate(
        rows, model="tiny", cost={"name": "constant", "step_s": 0.01},
        scheduler={"oracle": {"_target_": "my_policies.PastOutputs"}, "queue_order": "srpt", "max_num_seqs": 1},
    )  # fmt: skip
    starts = run.requests.sort_values("first_scheduled_ns")["request_id"].tolist()
    assert starts == ["long0", "short1", "short4", "short5", "long2", "long3"]


def test_a_whole_composition(examples: None, say: Say, rows: Path) -> None:
    """A request that is in a step for the first time, or again until its prompt is computed, is a prefill."""
    for max_prefills in (1, 3):
        ran = Ran(
            say, rows, "cache.num_gpu_blocks=64", "scheduler.max_num_batched_tokens=64",
            f"scheduler.composition={{_target_: my_policies.FewPrefills, max_prefills: {max_prefills}}}",
        )  # fmt: skip
        assert max(sum(num > 1 for num in line["scheduled"].values()) for line in ran.decisions) == max_prefills
    swapping = ("scheduler.preemption=swap", "cache.num_cpu_blocks=40")
    ran = Ran(say, rows, "scheduler.composition={_target_: my_policies.FewPrefills}", *swapping)
    assert ran.num_events("swapped_in") == ran.num_events("swapped_out") > 0


def test_the_list_of_policies_is_complete() -> None:
    """docs/policies.md names every policy (of routers docs/simulator.md has the table), preset and KV rule, with every
    value that a rule may have, and what makes each queue order that has parameters."""
    text = (DOCS / "policies.md").read_text()
    named = {name for key, group in POLICIES.items() if key != "backend.router" for name in group}
    named |= set(options("scheduler"))
    orders = POLICIES["scheduler.queue_order"]
    named |= {orders[name].__name__ for name in orders if name not in ("fcfs", "lcfs")}
    for rule in fields(KVRules):
        named |= {rule.name, *get_args(get_type_hints(KVRules)[rule.name])}
    assert [name for name in sorted(named) if f"`{name}`" not in text] == []
    assert [key for key in POLICIES if f"`{key}`" not in text] == []
