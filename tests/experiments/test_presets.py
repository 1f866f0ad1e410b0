"""Every preset composes, and serves whatever comes to its end."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
import yaml

import experiments.conf
from experiments import simulate
from experiments.configuration.config import RunConfig
from experiments.wiring.build import Pools, build_scheduler
from testbed.blocks.eviction import LRU, LRUByLastStep
from testbed.core.outcome import Finished, FinishReason, Outcome, StepResult
from testbed.core.plan import BatchPlan
from testbed.core.request import Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.errors import ConfigError
from tests.experiments.kit import TINY, config_of

FOLDER = Path(str(experiments.conf.__file__)).parent / "scheduler"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
NEVER_PREEMPT = {"orca", "static", "trtllm_no_evict"}
STEP_NS = 20_000_000
NUM_REQUESTS = 40


def preset(name: str, **dotted: object) -> RunConfig:
    return config_of((f"scheduler={name}", *TINY, "cache.num_cpu_blocks=40"), **dotted)


def scheduler_of(config: RunConfig, num_blocks: int = 40) -> Scheduler:
    return build_scheduler(config, Pools(num_blocks, 40))


def random_request(rng: random.Random, number: int, *, has_groups: bool) -> Request:
    """Prompts of a few common beginnings, each with its own end; outputs of up to 20 tokens, half of them forced."""
    prompt = [rng.randrange(3)] * rng.choice((0, 4, 8, 16)) + [rng.randrange(500) for _ in range(rng.randint(1, 24))]
    num_output = rng.randint(1, 20)
    is_forced = rng.random() < 0.5
    kind = rng.random() if has_groups else 1.0
    sampling = SamplingParams(
        max_tokens=num_output,
        n=rng.randint(2, 3) if kind < 0.2 else 1,
        beam_width=2 if 0.2 <= kind < 0.3 and not is_forced else 0,
    )
    return Request(
        f"r{number}",
        array("i", prompt),
        arrival_ns=number * STEP_NS // 2,
        forced_output=array("i", [rng.randrange(500) for _ in range(num_output)]) if is_forced else None,
        sampling=sampling,
        priority=rng.randrange(3),
        tenant=rng.choice(("x", "y")),
    )


def drawn(plan: BatchPlan, rng: random.Random) -> tuple[Outcome, ...] | None:
    rows = [row for row in plan.scheduled if row.samples and not row.forced]
    tokens = [[rng.randrange(2, 500) for _ in range(row.num_samples)] for row in rows]
    return tuple(Outcome(row.seq_id, (own[0],), None, tuple(own[1:])) for row, own in zip(rows, tokens, strict=True))


def serve(scheduler: Scheduler, seed: int, *, has_groups: bool) -> tuple[list[Finished], int]:
    """What finished, and how many preemptions there were; invariants are checked whenever something has changed."""
    rng = random.Random(seed)
    requests = [random_request(rng, number, has_groups=has_groups) for number in range(NUM_REQUESTS)]
    finished: list[Finished] = []
    num_preempted = now_ns = 0
    while requests or scheduler.has_work:
        while requests and requests[0].arrival_ns <= now_ns:
            scheduler.add(requests.pop(0))
        plan = scheduler.plan(now_ns)
        scheduler.check_invariants()
        now_ns += STEP_NS
        if plan.is_empty:
            assert not scheduler.has_work, f"nothing is done at {now_ns} ns of seed {seed}: {scheduler.unfinished()}"
            continue
        num_preempted += len(plan.preempted)
        finished += scheduler.commit(StepResult(now_ns, drawn(plan, rng)), now_ns)
        scheduler.check_invariants()
        assert scheduler.num_steps < 20_000, f"seed {seed} does not end"
    return finished, num_preempted


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_named_as_its_file_and_says_what_it_is(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert yaml.safe_load(text)["name"] == name
    assert preset(name).scheduler.name == name


@pytest.mark.parametrize(
    ("name", "num_seqs"),
    [
        ("lightllm", 1000), ("nano_vllm", 512), ("sarathi", 128), ("sglang_lpm", 2048), ("trtllm_max_util", 2048),
        ("trtllm_no_evict", 2048), ("vllm_v0", 256), ("vllm_v1_h100", 1024),
        ("vtc", 1000),
    ],
)  # fmt: skip
def test_a_preset_runs_as_many_sequences_as_its_system_by_default(name: str, num_seqs: int) -> None:
    assert config_of((f"scheduler={name}",)).scheduler.max_num_seqs == num_seqs


@pytest.mark.parametrize(("name", "num_tokens"), [("static", 16_384), ("orca", 16_384), ("vllm_v0", 2048)])
def test_a_step_without_a_budget_of_its_own_has_room_for_the_batches_of_its_system(name: str, num_tokens: int) -> None:
    def budget(length: int) -> int:
        return config_of((f"scheduler={name}", f"scheduler.max_model_len={length}")).limits.max_num_batched_tokens

    assert (budget(512), budget(30_000)) == (num_tokens, 30_000)


def test_a_composition_has_the_same_budget_by_its_name_and_by_its_class() -> None:
    own = "scheduler.composition={_target_: testbed.policies.compositions.static.Static}"
    for more in ((), (own,)):
        config = config_of(("scheduler=static", "scheduler.max_model_len=512", *more))
        assert config.limits.max_num_batched_tokens == 16_384


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_serves_single_sequences_to_their_end(name: str, prefix_caching: bool) -> None:
    num_preempted = 0
    for seed in range(3):
        scheduler = scheduler_of(preset(name, cache__prefix_caching=prefix_caching))
        finished, more = serve(scheduler, seed, has_groups=False)
        num_preempted += more
        assert sorted(item.request.request_id for item in finished) == sorted(f"r{i}" for i in range(NUM_REQUESTS))
        for item in finished:
            assert item.reason in (FinishReason.LENGTH, FinishReason.STOP), (item, seed)
            if item.request.forced_output is not None:
                assert list(item.output_token_ids) == list(item.request.forced_output)
        assert scheduler.blocks.num_free_blocks == 40
        assert scheduler.blocks.num_free_cpu_blocks == 40
        assert (scheduler.blocks.prefixes.num_hit_tokens > 0) is prefix_caching
    assert (num_preempted > 0) is (name not in NEVER_PREEMPT), f"{num_preempted} preemptions"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_serves_groups_to_their_end(name: str) -> None:
    for seed in range(3):
        scheduler = scheduler_of(preset(name))
        finished, _ = serve(scheduler, seed, has_groups=True)
        assert len(finished) == NUM_REQUESTS
        for item in finished:
            assert item.reason in (FinishReason.LENGTH, FinishReason.STOP), (item, seed)
            if item.request.sampling.num_seqs > 1:
                assert len(item.completions) == item.request.sampling.num_seqs
        assert scheduler.blocks.num_free_blocks == 40
        assert scheduler.blocks.num_free_cpu_blocks == 40


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_decides_the_same_twice(name: str) -> None:
    digests = []
    for _ in range(2):
        scheduler = scheduler_of(preset(name))
        serve(scheduler, 7, has_groups=True)
        digests.append(scheduler.digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("preset", "expected"), [("vllm_v0", LRUByLastStep), ("vllm_v1", LRU)])
def test_lru_is_that_of_the_system(preset: str, expected: type) -> None:
    scheduler = build_scheduler(config_of((*TINY, f"scheduler={preset}")), Pools(50, 0))
    assert type(scheduler.blocks._gpu.evictable) is expected


def test_where_the_free_list_is_the_order_lru_is_meant_by_its_name_and_by_its_class() -> None:
    by_class = "{_target_: testbed.blocks.eviction.%s}"
    for eviction in ("lru", by_class % "LRU"):
        build_scheduler(config_of((*TINY, "scheduler=nano_vllm", f"cache.eviction={eviction}")), Pools(50, 0))
    only = r"it goes with cache\.eviction=lru only"
    for eviction, said in (
        ("fifo", only), (by_class % "FIFO", only), ("{name: lru}", "has name where a class is named by _target_"),
        (by_class % "LRV", "eviction: cannot make 'testbed.blocks.eviction.LRV'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            build_scheduler(config_of((*TINY, "scheduler=nano_vllm", f"cache.eviction={eviction}")), Pools(50, 0))


def test_a_watermark_of_the_whole_pool_lets_requests_run_one_by_one() -> None:
    """vLLM V1 lifts it while nothing runs; one that held then, too, would let nothing start."""
    scheduler = scheduler_of(preset("vllm_v1", cache__watermark=0.99))
    finished, num_preempted = serve(scheduler, 0, has_groups=False)
    assert ({item.reason for item in finished} <= {FinishReason.LENGTH, FinishReason.STOP}, len(finished)) == (True, 40)
    assert num_preempted == 0
    always = preset("vllm_v1", cache__watermark=0.99, scheduler__kv_rules__watermark_when_idle=True)
    with pytest.raises(ConfigError, match=r"a watermark of 0\.99 leaves 40 of 40 KV blocks free: no prompt could"):
        scheduler_of(always)


def test_no_evict_reserves_what_a_trace_declares() -> None:
    rows = [{"arrival_time": 0, "prompt_tokens": 16, "output_tokens": 16} for _ in range(4)]
    most = {}
    for name, declared in (("none", {}), ("tight", {"max_tokens": 16}), ("loose", {"max_tokens": 112})):
        run = simulate([row | declared for row in rows], model="tiny", scheduler="trtllm_no_evict",
                       cache={"num_gpu_blocks": 10, "block_size": 16})  # fmt: skip
        most[name] = int(run.steps["num_decodes"].max())
        assert run.requests["num_output_tokens"].tolist() == [16] * 4
    assert most == {"none": 4, "tight": 4, "loose": 1}
