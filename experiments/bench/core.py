"""Speed of the core: scheduler steps/s at 256 sequences, and time per step over queue lengths and KV pool sizes.

Compare only the ratios of numbers from one run: machines are noisy.
"""

from __future__ import annotations

import time

from tqdm import tqdm

from experiments.configuration.compose import compose_config
from experiments.configuration.policies import POLICIES
from experiments.console import Parser
from experiments.runs.collector import fewer_collections
from experiments.wiring import build
from testbed.checks import require_whole
from testbed.core.outcome import Outcome, StepResult
from testbed.core.request import Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.traces.schema import Span
from testbed.traces.synthesis import content_key, materialize

NUM_SEQS, PROMPT_TOKENS, OUTPUT_TOKENS, VOCAB = 256, 64, 512, 32_000
SCHEDULERS = ("vllm_v1", "decode_first", "prefill_first")
QUEUE_LENGTHS = (100, 1_000, 10_000)
QUEUE_ORDERS = (*POLICIES["scheduler.queue_order"], "partial")
POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUEUE_STEPS, POOL_STEPS = 200, 400  # that are timed


def main(arguments: list[str]) -> int:
    parser = Parser("testbed bench core", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of the scheduler's measurements; the best counts (5)")
    options = parser.parse_args(arguments)
    require_whole("--repeats", options.repeats, 1)
    _bench_scheduler(options.repeats)
    print()
    _bench_queues(options.repeats)
    print()
    _bench_pools(options.repeats)
    return 0


def _bench_scheduler(repeats: int) -> None:
    """Prints the time of plan + commit, one step at a time, with the decision digest on.

    Simulated: output tokens are known in advance, as in a trace. Drawn: every step returns a different token for each
    sequence. With rows: as drawn, plus `plan.scheduled`, the inputs of a device, which a simulator never reads.
    """
    print(f"scheduler: {NUM_SEQS} running, {OUTPUT_TOKENS} output tokens each, 16-token blocks, best of {repeats}")
    print(f"  {'':<32}{'simulated':^20}{'drawn':^20}{'with rows':^20}")
    print(f"  {'scheduler':<16}{'prefix caching':<16}" + f"{'steps/s':>10}{'µs/step':>10}" * 3)
    points = [(name, caching) for name in SCHEDULERS for caching in (False, True)]
    lines: list[str] = []
    for name, caching in tqdm(points, desc="scheduler", disable=None, leave=False):
        best_ns = [
            min(_step_ns(name, caching, repeat, draws=draws, with_rows=with_rows) for repeat in range(repeats))
            for draws, with_rows in ((False, False), (True, False), (True, True))
        ]
        numbers = "".join(f"{1e9 / step_ns:>10,.0f}{step_ns / 1e3:>10.1f}" for step_ns in best_ns)
        lines.append(f"  {name:<16}{'on' if caching else 'off':<16}{numbers}")
    print("\n".join(lines))


def _step_ns(name: str, caching: bool, repeat: int, *, draws: bool, with_rows: bool) -> float:
    """Returns ns per step of plan + commit. with_rows: includes making the plan's rows."""
    scheduler = _scheduler([f"scheduler={name}", f"cache.prefix_caching={str(caching).lower()}"], 20_000)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for index in range(NUM_SEQS):
        prompt = materialize((Span(content_key("bench", repeat, index), 0, PROMPT_TOKENS),), VOCAB)
        output = materialize((Span(content_key("output", repeat, index), 0, OUTPUT_TOKENS),), VOCAB)
        scheduler.add(Request(str(index), prompt, sampling=sampling, forced_output=None if draws else output))
    with fewer_collections():  # every run does this
        return _drive(scheduler, draws=draws, with_rows=with_rows)


def _drive(scheduler: Scheduler, *, draws: bool, with_rows: bool) -> float:
    """Returns ns per step. All sequences run in every step. Making the outcomes is the model's work: not counted."""
    spent_ns = now_ns = 0
    clock = time.perf_counter_ns
    while scheduler.has_work:
        ids = range(NUM_SEQS if draws else 0)
        outcomes = tuple(Outcome(seq_id, ((now_ns * 7919 + seq_id * 31) % VOCAB,)) for seq_id in ids)
        now_ns += 1
        result = StepResult(now_ns, outcomes)
        began_ns = clock()
        plan = scheduler.plan(now_ns)
        if with_rows:
            assert len(plan.scheduled) == NUM_SEQS
        scheduler.commit(result, now_ns)
        spent_ns += clock() - began_ns
    assert scheduler.num_steps == OUTPUT_TOKENS
    return spent_ns / scheduler.num_steps


def _bench_queues(repeats: int) -> None:
    """Prints the time of steps that admit and finish one request each; it must not grow with the queue's length."""
    print(f"µs a step over queue lengths: 64 running, one ends and one is admitted each step, best of {repeats}")
    print(f"  {'queue order':<16}" + "".join(f"{length:>10,}" for length in QUEUE_LENGTHS))
    for order in tqdm(QUEUE_ORDERS, desc="queues", disable=None, leave=False):
        best = [min(_queue_us(order, length) for _ in range(repeats)) for length in QUEUE_LENGTHS]
        print(f"  {order:<16}" + "".join(f"{us:>10.1f}" for us in best))


def _queue_us(order: str, num_waiting: int) -> float:
    """Returns µs per step. lpm and dfs are first come, first served while more than 128 requests wait (their default).
    partial: decode_first with up to three partial prefills, of which one may be long; all waiting prompts are long."""
    if order == "partial":
        partial = ["scheduler.max_num_partial_prefills=3", "scheduler.long_prefill_token_threshold=32"]
    else:
        partial = [f"scheduler.queue_order={order}"]
    options = ["scheduler=decode_first", "scheduler.oracle=perfect", *partial, "scheduler.max_num_seqs=64"]
    scheduler = _scheduler(options, 20_000)
    for index in range(num_waiting + QUEUE_STEPS + 64):
        prompt = materialize((Span(content_key("bench", 0, index % 512), 0, PROMPT_TOKENS),), VOCAB)
        scheduler.add(
            Request(
                str(index), prompt, forced_output=prompt, arrival_ns=index, priority=index * 7 % 5,
                tenant=str(index % 8), deadline_ns=index * 31 % 1009,
            )
        )  # fmt: skip
    return _us_per_step(scheduler, QUEUE_STEPS)


def _bench_pools(repeats: int) -> None:
    print(f"µs a step over pools of KV blocks: 64 running of a few hundred tokens, turnover, best of {repeats}")
    print(f"  {'prefix caching':<16}" + "".join(f"{size:>11,}" for size in POOL_SIZES))
    for caching in (False, True):
        best = [min(_pool_us(size, caching) for _ in range(repeats)) for size in POOL_SIZES]
        print(f"  {'on' if caching else 'off':<16}" + "".join(f"{us:>11.1f}" for us in best))


def _pool_us(num_blocks: int, caching: bool) -> float:
    options = ["scheduler=decode_first", "scheduler.max_num_seqs=64", f"cache.prefix_caching={str(caching).lower()}"]
    scheduler = _scheduler(options, num_blocks)
    for index in range(64 + POOL_STEPS):
        prompt = materialize((Span(content_key("bench", 1, index), 0, PROMPT_TOKENS),), VOCAB)
        scheduler.add(Request(str(index), prompt, forced_output=prompt))
    return _us_per_step(scheduler, POOL_STEPS)


def _scheduler(options: list[str], num_blocks: int) -> Scheduler:
    config = compose_config([*options, "scheduler.max_num_batched_tokens=32768"])
    return build.build_scheduler(config, build.Pools(num_blocks, 0))


def _us_per_step(scheduler: Scheduler, num_steps: int) -> float:
    """Returns µs per step of plan + commit with forced outputs, not counting the first step."""
    scheduler.plan(0)
    scheduler.commit(StepResult(1), 1)
    began_ns = time.perf_counter_ns()
    for now_ns in range(1, num_steps + 1):
        scheduler.plan(now_ns)
        scheduler.commit(StepResult(now_ns + 1), now_ns + 1)
    return (time.perf_counter_ns() - began_ns) / num_steps / 1e3
