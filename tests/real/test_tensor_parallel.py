"""Ranks in processes of their own compute what one computes, and end together, however they end."""

from __future__ import annotations

import os
import random
import signal
import time
from array import array
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from real.backend import RealBackend
from real.block_tables import HostTables
from real.config import EngineOptions, RealConfig
from real.driver import Computed, Work
from real.parallel import backend as parallel
from real.parallel import distributed
from real.parallel.backend import RankedBackend
from real.parallel.wire import pack, unpack
from real.parallel.worker import Setup
from testbed.core.outcome import Outcome, TokenLogprobs
from testbed.core.plan import BatchPlan
from testbed.core.request import Request, SamplingParams
from testbed.errors import ConfigError, DeviceError, ModelError
from testbed.specs.model import ModelSpec
from tests.real.engine_helpers import ARCHITECTURES, TOLERANCE, plan_of, row, tiny_backend, tiny_spec
from tests.real.processes import assert_gone, ranks_of
from tests.real.served import Requests, served
from tests.real.thread_ranks import on_ranks
from tests.testbed.core_kit import make_limits

SIZES = {
    "block_size": 4, "num_gpu_blocks": 40, "num_cpu_blocks": 200, "max_num_batched_tokens": 64, "max_num_seqs": 16,
    "max_model_len": 256,
}  # fmt: skip
PLAN = plan_of(row(0, [1, 2, 3, 4, 5], [1, 2]))
PATIENCE_S = 15.0  # a machine that does other things too; alone it is a tenth


def ranked(spec: ModelSpec | None = None, num_ranks: int = 2, device: str = "cpu", **options) -> RankedBackend:
    config = RealConfig(device=device, rank_timeout_s=options.pop("rank_timeout_s", 60.0))
    return RankedBackend(spec or tiny_spec(), config, EngineOptions(**{**SIZES, **options}), num_ranks)


# --- the same plans on one rank and on several ---


class Twin:
    """One engine and its ranks execute the same plans; whatever they disagree about fails."""

    def __init__(self, one: RealBackend, several: RankedBackend) -> None:
        self._pair = one, several
        self._logits: list[list[torch.Tensor]] = [[], []]
        self.num_logits = 0
        for backend, seen in zip(self._pair, self._logits, strict=True):
            watch(backend, seen)

    def start(self, plan: BatchPlan) -> TwinWork:
        return TwinWork(self, [backend.start(plan) for backend in self._pair])

    def compare_logits(self) -> None:
        one, several = self._logits
        assert len(one) == len(several)
        for expected, actual in zip(one, several, strict=True):
            torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
        self.num_logits += sum(len(rows) for rows in one)
        one.clear()
        several.clear()


def watch(backend: RealBackend | RankedBackend, seen: list[torch.Tensor]) -> None:
    """Keeps the logits of every step, those of prompts that are scored included."""
    model = backend.runner.model
    of = model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found = of(hidden)
        seen.append(found.clone())
        return found

    model.logits = logits


class TwinWork:
    def __init__(self, twin: Twin, works: Sequence[Work]) -> None:
        self._twin, self._works = twin, works

    def wait(self) -> Computed:
        expected, actual = (work.wait() for work in self._works)
        self._twin.compare_logits()
        ours, theirs = (computed.outcomes or () for computed in (expected, actual))
        assert [bare(outcome) for outcome in theirs] == [bare(outcome) for outcome in ours]
        for outcome, other in zip(theirs, ours, strict=True):
            assert_close(outcome.logprobs, other.logprobs)
        for part, other in zip(actual.prompt_logprobs, expected.prompt_logprobs, strict=True):
            assert part[:2] == other[:2]
            assert_close(part.tokens, other.tokens)
        return expected


def bare(outcome: Outcome) -> Outcome:
    return outcome.replace(logprobs=())


def assert_close(actual: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    assert [one.rank for one in actual] == [one.rank for one in expected]
    assert [one.logprob for one in actual] == pytest.approx([one.logprob for one in expected], abs=1e-4)


EOS = 3
RNG = random.Random(11)
SHARED = [RNG.randrange(509) for _ in range(9)]
KINDS = [
    {},
    {"temperature": 1.0},
    {"n": 3, "temperature": 0.8},
    {"beam_width": 3, "n": 2},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "repetition_penalty": 1.2, "prompt_logprobs": 1, "logprobs": 2},
    {"n": 2, "best_of": 4},
]
REQUESTS = [
    Request(
        f"r{i}",
        array("i", SHARED[: RNG.randrange(10)] + [RNG.randrange(509) for _ in range(RNG.randrange(1, 40))]),
        arrival_ns=1_000_000 * i,
        sampling=SamplingParams(max_tokens=9, seed=i if i % 4 else None, **KINDS[i % len(KINDS)]),
    )
    for i in range(14)
]


def serve_on(backend: Twin, num_blocks: int) -> Requests:
    """Prompts in chunks of at most 24 tokens beside decodes, shared prefixes, too few blocks."""
    return served(
        backend, Requests(REQUESTS), "unified", num_blocks=num_blocks, num_cpu_blocks=200, caching=True,
        eos_token_id=EOS, limits=make_limits(seqs=16, budget=24, model_len=256),
    )  # fmt: skip


MODELS = {
    "qwen3, a KV head on both ranks": {"num_key_value_heads": 1},
    "llama with yarn": ARCHITECTURES["llama yarn"],
    "opt": ARCHITECTURES["opt"],
    "experts": ARCHITECTURES["qwen3 moe"],
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_two_ranks_give_the_logits_and_the_tokens_of_one(changes):
    """With a vocabulary that does not divide."""
    spec = tiny_spec(vocab_size=509, eos_token_id=EOS, **changes)
    several = ranked(spec)
    processes = ranks_of(os.getpid())
    assert processes
    try:
        twin = Twin(RealBackend(spec, RealConfig(device="cpu"), EngineOptions(**SIZES)), several)
        inbox = serve_on(twin, SIZES["num_gpu_blocks"])
    finally:
        several.close()
        several.close()
    assert len(inbox.outputs) == len(REQUESTS)
    assert inbox.num_copied > 0
    assert inbox.num_swapped_in > 0
    assert inbox.num_cached_tokens > 0
    assert twin.num_logits > 200
    assert_gone(processes)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_logits_of_one_and_a_dead_one_ends_both():
    """Decodes are replayed from graphs, which hold the sums over the ranks."""
    spec = tiny_spec(vocab_size=509)
    one, several = tiny_backend(spec, device="cuda", **SIZES), ranked(spec, device="cuda")
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    tokens, table = [RNG.randrange(509) for _ in range(30)], [9, 3, 17, 5, 30, 2, 21, 31]
    for backend, logits in zip((one, several), seen, strict=True):
        watch(backend, logits)
        backend.start(plan_of(row(0, tokens[:11], table))).wait()
        for start in range(11, 29):
            backend.start(plan_of(row(0, tokens, table, start=start, end=start + 1))).wait()
    for expected, actual in zip(*seen, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-3, rtol=0)  # TF32
    began = time.monotonic()
    for process in ranks_of(os.getpid()):
        os.kill(process, signal.SIGKILL)
    with pytest.raises(DeviceError, match=r"rank 1 .* was killed by SIGKILL"):
        several.start(PLAN).wait()
    assert time.monotonic() - began < PATIENCE_S
    several.close()


@pytest.mark.parametrize("num_bytes", [(90_000, 50_000), (50_000, 90_000)])
def test_the_rank_with_the_least_room_decides_how_many_blocks_there_are(num_bytes):
    made = on_ranks(2, lambda rank: tiny_backend(group=rank, num_gpu_blocks=None, cpu_kv_bytes=num_bytes[rank.rank]))
    per_block = made[0].cache.gpu.whole[:, :, 0].nbytes
    assert [backend.num_gpu_blocks for backend in made] == [50_000 // per_block] * 2


# --- what is sent ---

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
PAIRS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1)), max_size=3).map(tuple)
ROWS = st.builds(
    lambda seq_id, tokens, table, start, samples, scored: row(
        seq_id, [0] * start + tokens, table, start=start, samples=samples,
        sampling=SamplingParams(prompt_logprobs=scored),
    ).replace(num_prompt_tokens=start + 1),
    st.integers(0, 2**40), IDS.filter(len), st.lists(st.integers(-1, 2**31 - 1), max_size=5), st.integers(0, 9),
    st.booleans(), st.sampled_from([None, 0, 3]),
)  # fmt: skip


@given(st.lists(ROWS, max_size=4), PAIRS, PAIRS, PAIRS)
def test_a_plan_that_was_sent_asks_for_the_same_work(rows, swap_out, swap_in, copies):
    plan = plan_of(*rows, swap_out=swap_out, swap_in=swap_in, copies=copies)
    got = unpack(pack(plan, rows))
    assert (got.swap_out, got.swap_in, got.copies) == (swap_out, swap_in, copies)
    assert len(got.scheduled) == len(rows)
    for one, other in zip(rows, got.scheduled, strict=True):
        for name in ("seq_id", "start", "num_tokens", "samples"):
            assert getattr(one, name) == getattr(other, name)
        assert (list(one.tokens), list(one.block_table)) == (list(other.tokens), list(other.block_table))
        is_scored = one.sampling.prompt_logprobs is not None
        assert (other.sampling.prompt_logprobs is not None) == is_scored
        assert other.num_prompt_tokens == one.num_prompt_tokens * is_scored
        assert other.forced


def test_another_rank_s_device_is_sent_only_new_blocks_after_a_sequence_has_ended():
    driver, other = HostTables(3, 8), HostTables(3, 8)
    tables = {4: [5, 6], 7: [8, 9], 8: [1, 2]}
    for _ in range(2):
        rows = [row(seq_id, [0], table) for seq_id, table in tables.items()]
        new = driver.update(rows)[1].blocks.tolist()
        assert other.update(unpack(pack(plan_of(*rows), rows)).scheduled)[1].blocks.tolist() == new
        del tables[min(tables)]
        tables[8].append(3)
    assert new == [3]


# --- mistakes and deaths ---


def test_more_ranks_than_gpus_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(parallel, "resolve_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(DeviceError, match=r"device\.tensor_parallel_size is 4, but torch finds 3 GPUs"):
        ranked(num_ranks=4)


def test_ranks_that_do_not_divide_the_model_are_refused_before_any_is_started():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3; it must divide the 4 attention heads"):
        ranked(num_ranks=3)
    assert not ranks_of(os.getpid())


def test_memory_that_the_ranks_need_together_is_counted_together(monkeypatch):
    spec = tiny_spec(num_key_value_heads=1)  # it lies on both
    need = spec.num_parameters * 4 + 40 * 2 * 2 * 2 * 16 * 4 * 4  # weights; blocks of both ranks
    monkeypatch.setattr("real.host_memory.RESERVE_BYTES", 0)
    monkeypatch.setattr("real.host_memory.available_bytes", lambda: need - 1)
    with pytest.raises(DeviceError, match="no memory for 40 KV blocks"):
        ranked(spec)
    assert not ranks_of(os.getpid())


@pytest.mark.parametrize(("num_threads", "num_ranks", "each"), [(8, 2, 4), (3, 2, 1), (1, 4, 1)])
def test_ranks_on_the_cpu_share_its_threads(monkeypatch, num_threads, num_ranks, each):
    given: list[int | None] = []

    def start(setups: list[Setup], timeout_s: float) -> None:
        given.extend(setup.config.num_threads for setup in setups)
        raise InterruptedError

    monkeypatch.setattr(parallel, "Ranks", start)
    config = RealConfig(device="cpu", num_threads=num_threads)
    with pytest.raises(InterruptedError):
        RankedBackend(tiny_spec(), config, EngineOptions(**SIZES), num_ranks)
    assert given == [each] * (num_ranks - 1)


class Trap(int):
    """A seed that is no good in any process but this one."""

    def __new__(cls, what: str, value: int = 0) -> Trap:
        self = super().__new__(cls, value)
        self.what = what
        return self

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return Sprung, (self.what,)


class Sprung(Trap):
    def __mod__(self, other: int) -> int:
        if self.what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ModelError("model.safetensors has a hole")


@pytest.mark.parametrize(
    ("what", "error", "told"),
    [("dies", DeviceError, r"^rank 1 \(process \d+\) was killed by SIGKILL; the system kills whoever takes too much"),
     ("raises", ModelError, r"^rank 1 failed: model.safetensors has a hole$")],
)  # fmt: skip
def test_a_rank_that_fails_while_it_loads_ends_the_others_with_its_own_words(what, error, told):
    with pytest.raises(error, match=told):
        ranked(seed=Trap(what))
    assert not ranks_of(os.getpid())


@pytest.fixture
def pair() -> Iterator[RankedBackend]:
    backend = ranked(rank_timeout_s=4.0)
    yield backend
    backend.close()
    assert not ranks_of(os.getpid())


def test_a_rank_that_is_silent_ends_the_step_after_its_time_and_one_that_dies_at_once(pair):
    (process,) = ranks_of(os.getpid())
    pair.start(PLAN).wait()
    os.kill(process, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(DeviceError, match=r"rank 1 does not answer .*; if it was only slow, raise backend.rank_timeou"):
        pair.start(PLAN).wait()
    assert 3.0 < time.monotonic() - began < 4.0 + PATIENCE_S
    with pytest.raises(DeviceError, match="stopped in the middle of a step"):
        pair.start(PLAN)
    os.kill(process, signal.SIGKILL)


def test_a_lost_rank_s_message_has_no_place_in_the_backend_s_source():
    error = RuntimeError("[/torch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]\nmore")
    assert str(distributed._lost(error)) == "Connection closed by peer [127.0.0.1]"
