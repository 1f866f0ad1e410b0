"""Swaps and copies keep every logit, in the order of a plan: swap out, swap in, copy, compute."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.backend import RealBackend
from tests.real.engine_helpers import TOLERANCE, plan_of, row, step_logits, tiny_backend, tiny_spec

RNG = random.Random(5)
PROMPT = [RNG.randrange(512) for _ in range(18)]  # four full blocks of 4, and half of a fifth
OTHER = [RNG.randrange(512) for _ in range(20)]
TABLE = [9, 3, 17, 5, 30, 2]
CPU_BLOCKS = [5, 0, 9, 2, 14]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

Pairs = tuple[tuple[int, int], ...]


@pytest.fixture(params=DEVICES)
def backend(request) -> RealBackend:
    return tiny_backend(device=request.param)


def unshared(backend: RealBackend, tokens: list[int]) -> torch.Tensor:
    """Logits of a run of its own: the prompt in one piece, then a token a step, in blocks that nobody else has."""
    alone = tiny_backend(device=backend.cache.gpu.whole.device.type)
    table = list(range(12))
    logits = step_logits(alone, row(0, tokens[: len(PROMPT)], table))
    for start in range(len(PROMPT), len(tokens)):
        logits = step_logits(alone, row(0, tokens, table, start=start, end=start + 1))
    return logits[0]


def assert_close(logits: torch.Tensor, *expected: torch.Tensor) -> None:
    tolerance = TOLERANCE if logits.device.type == "cpu" else 2e-3  # TF32 in a GPU's float32 products
    torch.testing.assert_close(logits, torch.stack(expected), atol=tolerance, rtol=0)


def pairs(sources: list[int], destinations: list[int]) -> Pairs:
    return tuple(zip(sources, destinations, strict=True))


# --- swap ---


@pytest.mark.parametrize("back", [TABLE[:5], [44, 9, 45, 3, 17], TABLE[4::-1]], ids=["same", "other", "reversed"])
def test_a_swapped_sequence_goes_on_as_if_it_had_stayed(backend, back):
    """Bit for bit: only the place of its blocks has changed."""
    known = [*PROMPT, 7, 8, 9]
    step_logits(backend, row(0, PROMPT, TABLE))
    stayed = [step_logits(backend, row(0, known, TABLE, start=start, end=start + 1)) for start in (18, 19, 20)]

    moved = tiny_backend(device=backend.cache.gpu.whole.device.type)
    step_logits(moved, row(0, PROMPT, TABLE))
    moved.start(plan_of(swap_out=pairs(TABLE[:5], CPU_BLOCKS))).wait()
    step_logits(moved, row(1, OTHER, TABLE))  # its blocks are overwritten meanwhile
    table = [*back, 60]
    first = step_logits(moved, row(0, known, table, start=18, end=19), swap_in=pairs(CPU_BLOCKS, back))
    rest = [step_logits(moved, row(0, known, table, start=start, end=start + 1)) for start in (19, 20)]
    for actual, expected in zip([first, *rest], stayed, strict=True):
        assert torch.equal(actual, expected)


def test_shared_blocks_move_once_and_serve_both_sequences(backend):
    step_logits(backend, row(0, PROMPT, TABLE))
    one, other = [*PROMPT, 1], [*PROMPT, 2]
    step_logits(
        backend, row(0, one, TABLE, start=18), row(1, other, [*TABLE[:4], 31], start=18), copies=((TABLE[4], 31),)
    )
    backend.start(plan_of(swap_out=pairs([*TABLE[:5], 31], [*CPU_BLOCKS, 11]))).wait()
    step_logits(backend, row(2, OTHER, TABLE))
    back = [50, 51, 52, 53, 54, 55]
    one, other = [*one, 3], [*other, 3]
    logits = step_logits(
        backend,
        row(0, one, back[:5], start=19),
        row(1, other, [*back[:4], back[5]], start=19),
        swap_in=pairs([*CPU_BLOCKS, 11], back),
    )
    assert_close(logits, unshared(backend, one), unshared(backend, other))


# --- copy on write ---


@pytest.mark.parametrize("num_prompt_tokens", [16, 17, 18, 19])
def test_both_branches_after_a_fork_go_on_as_unshared_runs(backend, num_prompt_tokens):
    """A full last block is shared and never written; a partly filled one is copied for one of them."""
    prompt = [*PROMPT, 55][:num_prompt_tokens]
    num_full = num_prompt_tokens // 4
    step_logits(backend, row(0, prompt, TABLE))
    first, second = [*TABLE[:num_full], 20, 21, 22], [*TABLE[:num_full], 24, 25, 26]
    copies: Pairs = ()
    if num_prompt_tokens % 4:
        first[num_full] = TABLE[num_full]
        copies = ((TABLE[num_full], 24),)
    one, other = list(prompt), list(prompt)
    for step in range(7):
        one.append(100 + step)
        other.append(200 + step)
        start = len(one) - 1
        logits = step_logits(
            backend,
            row(0, one, first, start=start),
            row(1, other, second, start=start),
            copies=copies if step == 0 else (),
        )
        assert_close(logits, unshared(backend, one), unshared(backend, other))


# --- several moves in one plan ---


def test_blocks_swapped_out_are_swap_in_and_copy_destinations_of_the_same_plan(backend):
    """A goes out; B comes back into A's blocks; C's fork is copied into A's last one; then B, C and it compute."""
    a, b, c = OTHER[:18], PROMPT, [*OTHER[2:], 4][:18]
    tables = {"a": [0, 1, 2, 3, 4], "b": [10, 11, 12, 13, 14], "c": [20, 21, 22, 23, 24]}
    step_logits(backend, row(0, a, tables["a"]), row(1, b, tables["b"]), row(2, c, tables["c"]))
    backend.start(plan_of(swap_out=pairs(tables["b"], [0, 1, 2, 3, 4]))).wait()
    for layer in backend.cache.gpu:
        layer[:, tables["b"]] = 9.0
    b, c, fork = [*b, 1], [*c, 2], [*c, 3]
    back = [3, 1, 0, 2, 30]
    logits = step_logits(
        backend, row(1, b, back, start=18), row(2, c, tables["c"], start=18),
        row(3, fork, [20, 21, 22, 23, 4], start=18), swap_out=pairs(tables["a"], [10, 11, 12, 13, 14]),
        swap_in=pairs([0, 1, 2, 3, 4], back), copies=((24, 4),),
    )  # fmt: skip
    assert_close(logits, *(unshared(backend, tokens) for tokens in (b, c, fork)))
    a = [*a, 5]  # and what went out was read before it was overwritten
    back = [40, 41, 42, 43, 44]
    logits = step_logits(backend, row(0, a, back, start=18), swap_in=pairs([10, 11, 12, 13, 14], back))
    assert_close(logits, unshared(backend, a))


NUM_BLOCKS = 6
BLOCKS = st.integers(0, NUM_BLOCKS - 1)


def moves_strategy() -> st.SearchStrategy[Pairs]:
    """Pairs with any sources, repeated ones too, and destinations that are written once each."""
    return st.lists(st.tuples(BLOCKS, BLOCKS), max_size=NUM_BLOCKS, unique_by=lambda pair: pair[1]).map(tuple)


@pytest.fixture(scope="module", params=DEVICES)
def small(request) -> RealBackend:
    return tiny_backend(tiny_spec(), device=request.param, num_gpu_blocks=NUM_BLOCKS, num_cpu_blocks=NUM_BLOCKS)


@settings(max_examples=60)
@given(st.lists(st.tuples(moves_strategy(), moves_strategy(), moves_strategy()), min_size=1, max_size=4))
def test_any_moves_are_those_of_blocks_with_names(small, plans):
    """Against two lists of names, moved as the seam says: out, in, copy, each reading all before it writes any."""
    gpu, cpu = list(range(NUM_BLOCKS)), list(range(100, 100 + NUM_BLOCKS))
    for layer in range(2):
        for block in range(NUM_BLOCKS):
            small.cache.gpu.whole[layer][:, block] = gpu[block] + layer / 4
            small.cache.cpu[layer][:, block] = cpu[block] + layer / 4
    for swap_out, swap_in, copies in plans:
        small.start(plan_of(swap_out=swap_out, swap_in=swap_in, copies=copies)).wait()
        for sources, destinations, moves in ((gpu, cpu, swap_out), (cpu, gpu, swap_in), (gpu, gpu, copies)):
            read = [sources[source] for source, _ in moves]
            for name, (_, destination) in zip(read, moves, strict=True):
                destinations[destination] = name
    for layer in range(2):
        for tensor, names in ((small.cache.gpu.whole[layer], gpu), (small.cache.cpu[layer], cpu)):
            expected = torch.tensor(names, dtype=torch.float32) + layer / 4
            known = tensor[:, :NUM_BLOCKS].cpu()  # behind them lies the scratch block
            assert torch.equal(known, expected[None, :, None, None, None].expand(known.shape))
