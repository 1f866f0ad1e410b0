"""The engine as it runs on a GPU, on one that is not there (fake_cuda.py): streams, waits, captures, memory, devices.

What comes out must be what the engine gives on a CPU; what a GPU would not do, or would wait for, raises or is counted.
"""

from __future__ import annotations

import inspect
import random
import sys
from typing import Any

import pytest
import torch

from real import cache_engine
from real.backend import RealBackend
from real.clocks import SkippingClock
from real.parallel.distributed import DistributedGroup
from real.profiler.grid import Episode, Moves, Room
from real.profiler.measure import Bench, fill_with_noise, run_episode
from testbed.core.plan import PrefillChunk
from testbed.core.request import GREEDY, SamplingParams
from testbed.policies.preemption import Swap
from tests.real.engine_helpers import EXPERTS, LLAMA, OPT, plan_of, row, tiny_spec
from tests.real.fake_cuda import FakeGPU, fake_cuda
from tests.real.fake_engine import Watched, num_replays, on_cpu, on_gpu
from tests.real.fake_flash import FakeFlash, FakeFlash3, FakeVarlen
from tests.real.fake_kernels import fake_kernels
from tests.real.fake_launches import on_gpu as launched
from tests.real.fake_streams import FakeEvent, FakeGraph
from tests.real.served import Requests, served
from tests.real.test_engine_under_core import REQUESTS
from tests.real.test_profiler import alone
from tests.testbed.core_kit import make_limits, make_scheduler

PROVIDERS = ["triton", "torch"]


# --- whole runs ---


def serve_all(backend: Any, num_blocks: int, num_cpu_blocks: int, plans: int = 1) -> Requests:
    return served(
        backend, Requests(REQUESTS), "unified", num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks, caching=True,
        preemption=Swap(), limits=make_limits(budget=24, seqs=4, model_len=64, plans=plans),
    )  # fmt: skip


@pytest.fixture(scope="module")
def of_a_cpu() -> Requests:
    return serve_all(on_cpu(num_gpu_blocks=24), 24, 32)


@pytest.mark.parametrize("attention", PROVIDERS)
@pytest.mark.parametrize("plans", [1, 2], ids=["one plan", "a plan ahead"])
def test_a_run_with_chunks_swaps_and_mixed_batches_gives_the_tokens_of_a_cpu(gpu, plans, attention, of_a_cpu):
    engine = on_gpu(gpu, attention=attention, num_gpu_blocks=24, num_cpu_blocks=32)
    found = serve_all(engine, 24, 32, plans)
    assert found.outputs == of_a_cpu.outputs
    assert found.num_preemptions
    assert found.num_cached_tokens
    assert (num_replays(gpu) > 10) == (attention == "triton")


@pytest.mark.parametrize(
    ("name", "capability", "options"),
    [
        ("a window", (9, 0), {"sliding_window": 6}),
        ("e4m3, which the GPU converts", (9, 0), {"kv_dtype": "fp8_e4m3", "k_scale": 0.5}),
        ("e4m3, which it does not", (8, 0), {"kv_dtype": "fp8_e4m3", "v_scale": 2.0}),
        ("e5m2", (8, 0), {"kv_dtype": "fp8_e5m2"}),
    ],
)
def test_caches_of_all_kinds(monkeypatch, name, capability, options):
    with fake_cuda(monkeypatch, FakeGPU(), capability) as gpu:
        fake_kernels(monkeypatch, gpu)
        check_a_few_steps(on_gpu(gpu, attention="triton", **options), on_cpu(**options))


@pytest.mark.parametrize("attention", PROVIDERS)
@pytest.mark.parametrize(
    "changes", [OPT, {"num_key_value_heads": 4}, EXPERTS], ids=["opt", "one query head a KV head", "experts"]
)
def test_models_of_all_kinds(gpu, attention, changes):
    spec = tiny_spec(**changes)
    check_a_few_steps(on_gpu(gpu, spec, attention=attention), on_cpu(spec))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["one feed-forward", "experts"])
def test_fp8_weights(gpu, changes, dtype):
    """In float16 a few tokens are multiplied by weights as they are stored."""
    spec = tiny_spec(dtype="fp8", **changes)
    engine = on_gpu(gpu, spec, attention="triton", dtype=dtype)
    check_a_few_steps(engine, on_cpu(spec, dtype=dtype))
    assert num_replays(gpu)


STAND_INS = {"flash_attn": FakeFlash, "flash_attn_interface": FakeFlash3, "torch.nn.attention.varlen": FakeVarlen}


def install(monkeypatch: pytest.MonkeyPatch, gpu: FakeGPU, name: str) -> Any:
    """A package's stand-in, whose functions run on the GPU."""
    package = STAND_INS[name]()
    for function in [one for one in dir(type(package)) if one.startswith(("flash_attn_", "varlen_attn"))]:
        monkeypatch.setattr(package, function, launched(gpu, getattr(package, function)))
    monkeypatch.setitem(sys.modules, name, package)
    return package


@pytest.mark.parametrize("max_captured_tokens", [64, 0])
@pytest.mark.parametrize("block_size", [256, 16])
@pytest.mark.parametrize(
    ("package", "name", "calls", "calls_of_pages", "of_decodes"),
    [
        ("flash_attn", "flash_attn", {"varlen"}, {"varlen", "paged varlen", "decode"}, {"decode"}),
        ("torch.nn.attention.varlen", "varlen", {"varlen"}, {"varlen", "paged varlen"}, set()),
        ("flash_attn_interface", "flash_attn_3", {"step"}, {"step"}, {"step"}),
    ],
    ids=["flash-attn", "varlen", "flash-attn 3"],
)
def test_flash_attention_where_it_is_installed(
    gpu, monkeypatch, package, name, calls, calls_of_pages, of_decodes, block_size, max_captured_tokens
):
    """Its own pages, and those that it leaves to our kernels, as all captured steps with prompts."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: package.startswith("torch"))
    module = install(monkeypatch, gpu, package)
    options = {"block_size": block_size, "dtype": "float16"}
    engine = on_gpu(gpu, attention="auto", max_captured_tokens=max_captured_tokens, **options)
    assert engine.backend.attention_name == name
    module.calls.clear()
    if name == "flash_attn_3":
        module.longest.clear()
    check_a_few_steps(engine, on_cpu(**options))
    assert num_replays(gpu) == (7 if max_captured_tokens else 4)
    expected = calls_of_pages if block_size == 256 else calls
    if name == "flash_attn_3":  # one kind of call for any step
        assert max(module.longest) == 1 if max_captured_tokens else max(module.longest) > 1
    assert {kind for kind, _ in module.calls} == (expected & of_decodes if max_captured_tokens else expected)


@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True}, LLAMA], ids=["normalised heads", "biases", "plain heads"]
)
def test_a_layer_of_a_captured_step_is_nine_launches(gpu, monkeypatch, changes):
    """Two norms with their additions, four products, heads, attention, and what lies between gate and up; with prompts
    beside decodes one more. What is compiled on a GPU is one launch there."""
    for module, name in (("real.layers.norm", "add_rms_norm"), ("real.models.llama", "silu_and_mul")):
        function = getattr(sys.modules[module], name)
        monkeypatch.setattr(f"{module}.{name}", launched(gpu, inspect.unwrap(function)))
    counts: dict[bool, list[set[int]]] = {True: [], False: []}  # by whether there are prompts
    for num_layers in (2, 3):
        known = set(gpu.graphs)
        engine = on_gpu(gpu, tiny_spec(num_hidden_layers=num_layers, **changes), attention="triton")
        found = [[one.what for one in graph.launches] for graph in set(gpu.graphs) - known]
        for has_prompts, of_kind in counts.items():
            chosen = [whats for whats in found if ("prefill_kernel" in whats) == has_prompts]
            of_kind.append({sum("empty" not in what for what in whats) for whats in chosen})  # memory is no launch
        engine.backend.close()
    for has_prompts, ((two,), (three,)) in counts.items():  # the same for all sizes
        assert three - two == 9 + has_prompts


def test_a_step_with_prompts_is_as_few_calls_of_the_host_as_one_of_decodes(gpu, monkeypatch):
    """A replay, and what lies before and behind the layers, however many these are."""
    calls = [0]
    launch, replay = gpu.launch, FakeGraph.replay

    def counted(work: Any) -> None:
        calls[0] += 1
        launch(work)

    def replayed(graph: FakeGraph) -> None:
        before = calls[0]
        replay(graph)
        calls[0] = before + 1

    monkeypatch.setattr(gpu, "launch", counted)
    monkeypatch.setattr(FakeGraph, "replay", replayed)
    engine = on_gpu(gpu, tiny_spec(num_hidden_layers=5), attention="triton")
    found = []
    first, second = list(range(1, 11)), list(range(11, 30))
    for rows in (  # each with new blocks
        [row(0, first[:8], [1, 2]), row(1, second[:5], [3, 4])],
        [row(0, first[:9], [1, 2, 5], start=8), row(1, second[:6], [3, 4], start=5)],
        [row(0, first, [1, 2, 5], start=9), row(1, second[:16], [3, 4, 6, 7], start=6)],
    ):
        before = calls[0]
        engine.step(*rows)
        found.append(calls[0] - before)
    prompts, decodes, mixed = found
    assert prompts - 1 == decodes == mixed < 10  # of new sequences, also what they sample by


def check_a_few_steps(engine: Watched | Unwatched, reference: RealBackend) -> None:
    """Prompts, chunks, decodes alone and in pairs, mixed, copied, moved out and in: the tokens of the reference."""
    rng = random.Random(8)
    first, second = ([rng.randrange(512) for _ in range(num)] for num in (13, 19))
    tables = [[9, 3, 17, 5, 30, 2], [1, 40, 22, 8, 33, 12]]
    copies = ((3, 50), (5, 51))
    out, back = ((1, 5), (40, 0), (22, 6)), ((5, 41), (0, 42), (6, 60))
    steps: list[tuple[list[Any], dict[str, Any]]] = [
        ([(0, first, 0, 13)], {}),
        ([(1, second, 0, 9), (0, first, 13, 14)], {}),
        ([(1, second, 9, 19), (0, first, 14, 15)], {"copies": copies}),
        ([(0, first, 15, 16), (1, second, 19, 20)], {}),
        ([(0, first, 16, 17)], {"swap_out": out}),
        ([(0, first, 17, 18), (1, second, 20, 21)], {"swap_in": back}),
        ([(1, second, 21, 22)], {"swap_out": ((9, 9),), "swap_in": ((9, 9),), "copies": ((9, 10),)}),
    ]
    for number, (wanted, moves) in enumerate(steps):
        if number == 2:
            tables[0][1], tables[0][3] = 50, 51
        if number == 5:
            tables[1][:3] = [41, 42, 60]
        rows = [
            row(i, known, tables[i], start=start, end=end, samples=end == len(known)) for i, known, start, end in wanted
        ]
        found = engine.step(*rows, **moves)
        expected = reference.start(plan_of(*rows, **moves)).wait()[0]
        assert found == expected, f"step {number}"
        for outcome in expected or ():
            (first, second)[outcome.seq_id].extend(outcome.tokens)


# --- sampling ---

EVERYTHING = [
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.1, top_k=5, top_p=0.8, min_p=0.01, seed=4, logprobs=2),
    SamplingParams(temperature=0.7, top_p=0.5, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    SamplingParams(logit_bias=((7, 30.0), (9, 31.0)), logprobs=3, min_tokens=4, stop_token_ids=(9,)),
    SamplingParams(prompt_logprobs=2, logprobs=0),
    SamplingParams(temperature=1.0, n=3, seed=8, logprobs=1),
    SamplingParams(beam_width=2),
    GREEDY,
]


@pytest.mark.parametrize("num_new", [6, 1], ids=["prompts", "decodes"])
def test_a_step_with_all_that_a_sampler_can_do_waits_once(gpu, num_new):
    rng = random.Random(2)
    known = [[rng.randrange(512) for _ in range(6)] for _ in EVERYTHING]
    rows = []
    for i, sampling in enumerate(EVERYTHING):
        made = row(i, known[i], [2 * i, 2 * i + 1], start=6 - num_new, sampling=sampling)
        num_samples = sampling.n if num_new > 1 else 1
        rows.append(made.replace(num_prompt_tokens=6, history=tuple(known[i]), num_samples=num_samples, group_id=i))
    engine, reference = on_gpu(gpu, max_num_seqs=8), on_cpu(max_num_seqs=8)
    if num_new == 1:  # what comes before them
        prompts = [row(i, tokens, [2 * i, 2 * i + 1], end=5, samples=False) for i, tokens in enumerate(known)]
        assert engine.step(*prompts) is reference.start(plan_of(*prompts)).wait()[0] is None
    found = engine.start(plan_of(*rows)).wait()
    expected = reference.start(plan_of(*rows)).wait()
    for ours, theirs in zip(found.outcomes, expected.outcomes, strict=True):
        assert (ours.tokens, ours.forks) == (theirs.tokens, theirs.forks)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert len(found.prompt_logprobs) == len(expected.prompt_logprobs) == (num_new > 1)


# --- several ranks, profiles ---


class Pair:
    """NCCL's group of two ranks that hold the same: what torch.distributed calls on the GPU, on the current stream."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        assert not options.asyncOp
        tensors[0].mul_(2)

    def allgather(self, parts: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> None:
        assert not options.asyncOp
        for part in parts[0]:
            part.copy_(tensors[0])


@pytest.mark.parametrize("attention", PROVIDERS)
def test_a_rank_of_two_captures_its_collectives_and_waits_once_a_step(gpu, attention):
    spec = tiny_spec(vocab_size=510)
    pair = [DistributedGroup(0, 2, Pair()) for _ in range(2)]
    engine = on_gpu(gpu, spec, attention=attention, group=pair[0], num_gpu_blocks=None)
    num = engine.backend.num_gpu_blocks
    check_a_few_steps(engine, on_cpu(spec, group=pair[1], num_gpu_blocks=num))
    assert bool(num_replays(gpu)) == (attention == "triton")


def test_episodes_of_a_profile_wait_once_a_step(gpu):
    engine = on_gpu(gpu, num_gpu_blocks=60)
    fill_with_noise(engine.backend.cache.gpu.whole)
    assert engine.backend.cache.gpu.whole.inner.std() > 0.5
    room = Room(4, 60, 16, 4, 64, 64)
    caching = []

    def scheduler(*, budget: int, caching: bool | None, decodes_wait: bool) -> Any:
        return make_scheduler(
            "unified", num_blocks=60, num_cpu_blocks=16, block_size=4, caching=bool(caching),
            limits=make_limits(seqs=4, budget=budget, model_len=64),
        )  # fmt: skip

    bench = Bench(engine, SkippingClock(), room, scheduler, alone, 512, GREEDY)
    moves = (Moves(3), Moves(0, 3), Moves(2, 2), Moves(0, 0, 2))
    for episode in (
        Episode((9, 20), 2, moves, ((PrefillChunk(0, 20),), (PrefillChunk(8, 5), PrefillChunk(0, 3)))),
        Episode((8,), batches=((PrefillChunk(0, 30),),), budget=16),
    ):
        assert episode.fits(room)
        measured = run_episode(bench, episode, 1)
        assert len(measured) >= episode.num_alone + len(episode.moves) + len(episode.batches)
        assert all(spans.forward_ns > 0 for _, spans, _ in measured)
        caching += [shape.num_blocks_swapped_out for shape, _, _ in measured]
    assert max(caching) == 3
    assert engine.num_steps >= 10


@pytest.mark.parametrize("attention", PROVIDERS)
@pytest.mark.parametrize(("layers_of_a_launch", "num_launches"), [(1, 5), (2, 3), (8, 1)])
def test_all_blocks_that_a_step_swaps_are_a_launch_a_few_layers_for_each_way(
    gpu, monkeypatch, layers_of_a_launch, num_launches, attention
):
    monkeypatch.setattr(cache_engine, "SWAP_LAYERS", layers_of_a_launch)
    engine = on_gpu(gpu, tiny_spec(num_hidden_layers=5), attention=attention, cuda_graphs=False)
    launched: list[str] = []
    launch = gpu.launch
    monkeypatch.setattr(gpu, "launch", lambda work: (launched.append(work.what), launch(work)))
    out, back = ((1, 1), (7, 3), (9, 2), (4, 9)), ((5, 10), (0, 12))
    engine.step(swap_out=out, swap_in=back)
    assert launched.count("move_kernel") == 2 * num_launches
    assert len(launched) == 2 * num_launches + 2  # and the pairs of each way, once for all layers


def test_the_swaps_of_a_step_are_waited_for_once(gpu, monkeypatch):
    """Each layer's by the step that they belong to, launched kernel by kernel; by none after it."""
    engine = on_gpu(gpu, max_captured_tokens=0)
    waits: list[int] = []
    wait = FakeEvent.wait

    def counted(self: FakeEvent) -> None:
        waits[-1] += 1
        wait(self)

    monkeypatch.setattr(FakeEvent, "wait", counted)
    for moves in ({"swap_out": ((1, 1),)}, {}, {"swap_in": ((1, 1),)}):
        waits.append(0)
        engine.step(row(0, [1, 2, 3], [2]), **moves)
    assert waits == [2, 0, 2], "of two layers"


def test_an_engine_that_can_swap_has_done_so_once_before_it_serves(gpu, monkeypatch):
    """Or the first swap would wait for its kernel to be compiled."""
    launched: list[str] = []
    launch = gpu.launch
    monkeypatch.setattr(gpu, "launch", lambda work: (launched.append(work.what), launch(work)))
    on_gpu(gpu)
    assert launched.count("move_kernel") == 1 + 2  # a copy, and a block of all layers out and back
    launched.clear()
    on_gpu(gpu, num_cpu_blocks=0)
    assert launched.count("move_kernel") == 1


def test_copies_read_their_blocks_before_another_copy_of_the_step_writes_them(gpu):
    """Which the kernel, that copies in no particular order, cannot."""
    engine = on_gpu(gpu)
    blocks = engine.backend.cache.gpu.whole
    fill_with_noise(blocks)
    before = blocks.inner.clone()
    engine.step(copies=((1, 2), (2, 3), (7, 1)))
    assert torch.equal(blocks.inner[:, :, [2, 3, 1]], before[:, :, [1, 2, 7]])


def test_blocks_are_swapped_where_no_kernel_can_run(gpu, monkeypatch):
    monkeypatch.setattr("real.kernels.why_not", lambda device: "no compiler")
    engine, reference = on_gpu(gpu, attention="torch").backend, on_cpu()
    check_a_few_steps(Unwatched(engine), reference)


class Unwatched:
    """An engine that may wait."""

    def __init__(self, backend: RealBackend) -> None:
        self._backend = backend

    def step(self, *rows: Any, **moves: Any) -> Any:
        return self._backend.start(plan_of(*rows, **moves)).wait()[0]


def test_swaps_that_the_copies_of_a_step_wait_for_are_timed_once(gpu):
    """The clock of this GPU counts launches, of all streams: while swaps are launched on theirs, the step's waits."""
    engine = on_gpu(gpu)
    swaps, copies = {"swap_out": ((1, 1), (7, 3))}, {"copies": ((2, 10),)}

    def swap_ns(**moves: Any) -> int:
        spans = engine.start(plan_of(**moves)).wait()[1]
        assert spans.forward_ns == spans.sample_ns == 0
        return spans.swap_ns

    alone, copied = swap_ns(**swaps), swap_ns(**copies)
    assert (alone > 0, copied > 0) == (True, True)
    assert swap_ns(**swaps, **copies) == alone + copied
    assert swap_ns(**swaps) == alone
