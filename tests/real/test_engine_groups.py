"""Groups on the engine: beam search equals Hugging Face's, parallel samples equal single ones, swaps change nothing."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import Qwen3ForCausalLM

from real.backend import RealBackend
from real.sampling.beams import BeamInputs, Candidates, advance, beam_inputs, best_continuations
from testbed.core.request import SamplingParams
from tests.real.engine_helpers import TOLERANCE, checkpoint, plan_of, tiny_backend, tiny_spec
from tests.real.group_core import Group, HandCore

PROMPTS = [[5, 9, 301, 44, 8, 77, 2], [13, 13, 250], [400 + i for i in range(12)], [7]]
EOS = 3


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("qwen3"), tiny_spec(eos_token_id=EOS))


@pytest.fixture(scope="module")
def reference(spec):
    model = Qwen3ForCausalLM.from_pretrained(spec.path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # a test says so where tokens end a sequence
    return model


def run(core: HandCore, backend: RealBackend, chunk: int = 64) -> None:
    """Until every group is finished."""
    while core.groups:
        step_once(core, backend, chunk)


def step_once(core: HandCore, backend: RealBackend, chunk: int = 64) -> None:
    core.commit(backend.start(core.plan(chunk)).wait()[0])


def hand_core(eos: int | None = None) -> HandCore:
    return HandCore(num_gpu_blocks=64, num_cpu_blocks=64, eos=eos)


def search(width: int, **options) -> SamplingParams:
    return SamplingParams(beam_width=width, n=width, **({"ignore_eos": True} | options))


def scores(reference, prompt: list[int], outputs: list[list[int]], length_penalty: float = 1.0) -> list[float]:
    """Summed log-probability of each output, by its length."""
    values = []
    for output in outputs:
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.double().log_softmax(-1)[torch.arange(len(output)), output]
        values.append(log_probs.sum().item() / len(output) ** length_penalty)
    return values


def best(reference, prompt: list[int], group: Group, length_penalty: float = 1.0) -> list[list[int]]:
    """What the text API will return: the most probable of the finished sequences."""
    ranked = zip(scores(reference, prompt, group.finished, length_penalty), group.finished, strict=True)
    return [output for _, output in sorted(ranked, reverse=True)][: group.sampling.n]


def expected_beams(reference, prompt, width, num_tokens, **options) -> list[list[int]]:
    ids = torch.tensor([prompt])
    outputs = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, num_beams=width,
        num_return_sequences=width, do_sample=False, pad_token_id=0, **options,
    )  # fmt: skip
    return [output[len(prompt) :].tolist() for output in outputs]


# --- beam search ---


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_beams_equal_those_of_transformers(spec, reference, prompt, width):
    core = hand_core()
    group = core.add(prompt, search(width), 17)
    run(core, tiny_backend(spec))
    assert best(reference, prompt, group) == expected_beams(reference, prompt, width, 17)
    assert core.num_free == (64, 64)
    assert (core.num_copies > 0) == (width > 1)


@pytest.mark.parametrize("chunk", [3, 64])
def test_searches_in_one_batch_do_not_touch_each_other(spec, reference, chunk):
    core, backend = hand_core(), tiny_backend(spec)
    groups = []
    for prompt, width in zip(PROMPTS, (4, 1, 3, 2), strict=True):
        groups.append(core.add(prompt, search(width), 12))
        step_once(core, backend, chunk)  # they start one after another
    core.add([1, 2, 3], SamplingParams(temperature=1.0, n=3), 9)
    run(core, backend, chunk)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert best(reference, prompt, group) == expected_beams(reference, prompt, group.sampling.n, 12)


@pytest.fixture(scope="module")
def met(reference) -> list[list[int]]:
    """By prompt, tokens that many beams meet."""
    return [sorted({beam[5] for beam in expected_beams(reference, prompt, 4, 16)}) for prompt in PROMPTS]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_finished_hypotheses_equal_those_of_transformers(spec, reference, met, width, length_penalty):
    """Stop tokens that many beams meet; transformers pads what ends early with 0, which is never met."""
    num_ended = 0
    for prompt, stops in zip(PROMPTS, met, strict=True):
        core, sampling = hand_core(EOS), search(width, ignore_eos=False, stop_token_ids=tuple(stops), max_tokens=16)
        group = core.add(prompt, sampling, 16)
        backend = tiny_backend(spec)
        run(core, backend)
        expected = expected_beams(
            reference, prompt, width, 16, eos_token_id=[*stops, EOS], early_stopping=True, length_penalty=length_penalty
        )
        ended = [unpadded(beam, (*stops, EOS)) for beam in expected]
        assert best(reference, prompt, group, length_penalty) == ended
        assert width <= len(group.finished) < 2 * width
        num_ended += sum(beam[-1] in (*stops, EOS) for beam in group.finished)
        assert core.num_free == (64, 64)
    assert num_ended >= 4


@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len"])
def test_many_stop_tokens_and_few_steps_end_as_in_transformers(spec, reference, limit):
    """At the length limit what ends there competes with what meets a stop token, whether or not these are enough."""
    rng = random.Random(3)
    for _ in range(60):
        prompt = [rng.randrange(4, 512) for _ in range(rng.randrange(1, 8))]
        width, num_tokens = rng.choice([2, 3, 4]), rng.choice([1, 2, 3, 4])
        stops = sorted(rng.sample(range(4, 512), rng.choice([30, 120])))
        core, options = hand_core(EOS), {"ignore_eos": False, "stop_token_ids": tuple(stops)}
        if limit == "max_tokens":
            options["max_tokens"], max_model_len = num_tokens, None
        else:
            max_model_len = len(prompt) + num_tokens
        group = core.add(prompt, search(width, **options), num_tokens)
        run(core, tiny_backend(spec, max_model_len=max_model_len))
        found = expected_beams(reference, prompt, width, num_tokens, eos_token_id=[*stops, EOS], early_stopping=True)
        assert best(reference, prompt, group) == [unpadded(output, (*stops, EOS)) for output in found]


def unpadded(output: list[int], stops: tuple[int, ...]) -> list[int]:
    """The output up to its first stop token; transformers pads it with 0 behind."""
    end = next((i + 1 for i, token in enumerate(output) if token in stops), len(output))
    return output[:end]


def test_swapping_a_search_out_and_in_changes_nothing(spec, reference):
    core, backend = hand_core(), tiny_backend(spec, num_cpu_blocks=64)
    groups = [core.add(prompt, search(3), 14) for prompt in PROMPTS]
    rng = random.Random(2)
    num_swaps = 0
    while core.groups:
        for group in core.groups:
            if group.is_swapped and rng.random() < 0.5:
                core.swap_in(group)
            elif not group.is_swapped and group.has_forked and rng.random() < 0.3:
                core.swap_out(group)
                num_swaps += 1
        step_once(core, backend)
    assert num_swaps > 5
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert best(reference, prompt, group) == expected_beams(reference, prompt, 3, 14)


def test_more_beams_than_tokens(tmp_path):
    spec = checkpoint(tmp_path, tiny_spec(vocab_size=3, name="three-tokens"))
    core = hand_core()
    group = core.add([0, 1], search(5), 4)
    run(core, tiny_backend(spec))
    assert len(group.finished) == 5  # 3 beams after the first step, then 5 of 9
    assert len({tuple(output) for output in group.finished}) == 5


def test_a_search_that_can_only_stop_ends():
    outcomes = advance(
        [beam_row(0, 0, [5, 6], search(2, ignore_eos=False, stop_token_ids=(0,)), num_samples=2)],
        Candidates(torch.tensor([[-0.5, -1.0]]), torch.tensor([[0, 1]])),
        eos_token_id=1,
        max_model_len=99,
    )
    assert [outcome.values()[:5] for outcome in outcomes] == [(0, (0,), None, (1,), False)]
    assert [one[:2] for one in outcomes[0].logprobs] == [(-0.5, 1), (-1.0, 2)]


def test_hypotheses_come_with_their_scores(spec, reference):
    """With them the text layer ranks; a search whose hypotheses end at different lengths, and one that may not yet."""
    stops = sorted({beam[2] for beam in expected_beams(reference, PROMPTS[0], 4, 9)})
    lengths = {}
    for min_tokens in (0, 5):
        core = hand_core()
        group = core.add(PROMPTS[0], search(4, stop_token_ids=tuple(stops), min_tokens=min_tokens), 9)
        run(core, tiny_backend(spec))
        assert group.scores == pytest.approx(scores(reference, PROMPTS[0], group.finished, 0.0), abs=1e-4)
        lengths[min_tokens] = sorted(map(len, group.finished))
    assert lengths[0][0] <= 3
    assert lengths[5][0] >= 6


def beam_row(seq_id: int, group_id: int, tokens: list[int], sampling: SamplingParams, num_samples: int = 1):
    core = HandCore(8, 0)
    core.add(tokens, sampling, 9)
    (row,) = core.plan().scheduled
    start = 0 if num_samples > 1 else len(tokens) - 1
    return row.replace(
        seq_id=seq_id, group_id=group_id, num_samples=num_samples, start=start, num_tokens=len(tokens) - start,
        tokens=tokens[start:],
    )  # fmt: skip


def step(rows, found: list[list[tuple[int, float]]]):
    """One step with these best (token, log-probability) of each row: what is decided, without the log-probabilities."""
    log_probs = torch.tensor([[value for _, value in row] for row in found])
    token_ids = torch.tensor([[token for token, _ in row] for row in found])
    return [outcome.values()[:5] for outcome in advance(rows, Candidates(log_probs, token_ids), None, 99)]


def live_rows(seq_ids, tokens, scores, num_finished, sampling):
    """The rows of a group's live beams, whose newest tokens and sums are these."""
    pairs = zip(seq_ids, tokens, scores, strict=True)
    return [beam_row(i, 0, own, sampling).replace(score=score, num_finished=num_finished) for i, own, score in pairs]


def test_the_order_of_outcomes_and_of_the_rows_that_follow():
    sampling = search(3, ignore_eos=False, stop_token_ids=(99,))
    found = [[(10, -1.0), (99, -1.5), (11, -2.0), (12, -3.0), (13, -9.0)]]
    outcomes = step([beam_row(0, 0, [1, 2], sampling, num_samples=3)], found)
    # three live beams, and beside them one finished hypothesis, as the last fork
    assert outcomes == [(0, (10,), None, (11, 12, 99), False)]

    rows = live_rows((0, 1, 2), [[1, 2, token] for token in (10, 11, 12)], (-1.0, -2.0, -3.0), 1, sampling)
    found = [
        [(20, -4.0), (21, -5.0), (22, -5.5), (23, -20.0)],  # -5, -6, -6.5
        [(99, -0.5), (30, -3.2), (31, -20.0), (32, -20.0)],  # -2.5 ends, -5.2
        [(40, -0.1), (99, -9.0), (42, -9.0), (43, -9.0)],  # -3.1; a stop that is not among the best three is nothing
    ]
    outcomes = step(rows, found)
    assert outcomes == [(0, (20,), None, (), False), (1, (30,), None, (99,), False), (2, (40,), None, (), False)]

    rows = live_rows((0, 1, 2), [[1, 2, 7, token] for token in (20, 30, 40)], (-5.0, -5.2, -3.1), 2, sampling)
    found = [
        [(50, -9.0), (51, -9.0), (52, -9.0), (53, -9.0)],  # loses
        [(60, -9.0), (61, -9.0), (62, -9.0), (63, -9.0)],  # loses
        [(70, -0.1), (71, -0.2), (72, -0.3), (73, -0.4)],
    ]
    outcomes = step(rows, found)
    assert outcomes == [(0, (), None, (), True), (1, (), None, (), True), (2, (70,), None, (71, 72), False)]

    rows = live_rows((2, 5, 6), [[1, 2, 7, 40, token] for token in (70, 71, 72)], (-3.2, -3.3, -3.4), 2, sampling)
    found = [
        [(80, -1.0), (81, -9.0), (82, -9.0), (83, -9.0)],
        [(99, -0.1), (91, -9.0), (92, -9.0), (93, -9.0)],  # the third that is finished: the search is over
        [(80, -3.0), (81, -9.0), (82, -9.0), (83, -9.0)],
    ]
    outcomes = step(rows, found)
    assert outcomes == [(2, (), None, (), True), (5, (99,), None, (), False), (6, (), None, (), True)]


def test_candidates_that_others_ask_for_change_nothing_among_equals():
    """Logits of 16-bit models are often equal. A batch takes as many candidates as the request that needs most."""
    logits = torch.randint(-3, 4, (5, 600), generator=torch.Generator().manual_seed(1)) * 0.5
    logits[3] = -0.0
    logits[3, ::2] = 0.0
    few, many = (best_continuations(logits, BeamInputs(torch.arange(5), num)) for num in (4, 300))
    assert torch.equal(few.token_ids, many.token_ids[:, :4])
    assert torch.equal(few.log_probs, many.log_probs[:, :4])
    order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(many.token_ids, order.indices[:, :300])
    torch.testing.assert_close(many.log_probs, logits.log_softmax(-1).gather(-1, many.token_ids))
    asking = [beam_row(0, 0, [1, 2], search(3, logprobs=num)) for num in (2, 9)]
    assert [beam_inputs([each]).num_candidates for each in asking] == [4, 9]
    row = beam_row(0, 0, [1, 2], search(3, logprobs=2), num_samples=3)
    near = Candidates(torch.tensor([[-1.0, -1.0, -1.0, -2.0, -2.0]]), torch.tensor([[9, 8, 7, 6, 5]]))
    less = Candidates(near.log_probs[:, :4], near.token_ids[:, :4])
    (outcome,) = advance([row], near, None, 99)
    assert outcome.values() == advance([row], less, None, 99)[0].values()
    assert (*outcome.tokens, *outcome.forks) == (9, 8, 7)
    assert [one.rank for one in outcome.logprobs] == [1, 1, 1]


def test_beams_that_do_not_stand_together_are_refused():
    sampling = search(2)
    found = [[(10, -1.0), (11, -2.0), (12, -3.0)]]
    rows = [beam_row(i, 4, [1, 2, token], sampling) for i, token in enumerate((10, 11))]
    with pytest.raises(AssertionError, match="the beams of group 4 do not stand together"):
        step([rows[0], rows[1].replace(group_id=6), rows[1]], found * 3)
    with pytest.raises(AssertionError, match="the beams of group 4 are not of one length"):
        step([rows[0], beam_row(1, 4, [1, 2, 3, 4], sampling)], found * 2)


# --- parallel samples ---


def test_parallel_samples_equal_single_ones_with_the_same_keys(spec):
    """Member j draws what a sequence of its own with its keys would: whatever else runs, chunked or swapped."""
    sampling = SamplingParams(temperature=1.0, n=2, best_of=4, seed=8)
    runs = []
    for others, chunk, swaps in [((), 64, False), (PROMPTS, 3, False), (PROMPTS[:2], 5, True)]:
        core, backend = hand_core(), tiny_backend(spec, num_cpu_blocks=64)
        for prompt in others:
            core.add(prompt, SamplingParams(temperature=1.0, n=2), 9)
        group = core.add(PROMPTS[0], sampling, 15)
        while core.groups:
            if swaps and group.has_forked and group in core.groups:
                (core.swap_in if group.is_swapped else core.swap_out)(group)
            step_once(core, backend, chunk)
        runs.append(group.finished)
        assert core.num_free == (64, 64)
    assert runs[0] == runs[1] == runs[2]
    assert len({tuple(output) for output in runs[0]}) == 4


def test_greedy_parallel_samples_are_all_the_same(spec):
    core = hand_core()
    group = core.add(PROMPTS[0], SamplingParams(n=3), 8)
    alone = core.add(PROMPTS[0], SamplingParams(), 8)
    run(core, tiny_backend(spec))
    assert group.finished == alone.finished * 3


def test_the_first_draw_of_several_is_the_only_one_of_one(spec):
    backend = tiny_backend(spec)
    outcomes = {}
    for best_of in (1, 2, 6):
        core = hand_core()
        core.add(PROMPTS[0], SamplingParams(temperature=1.0, seed=5, best_of=best_of), 8)
        (outcomes[best_of],) = backend.start(core.plan()).wait().outcomes
        assert len(outcomes[best_of].forks) == best_of - 1
    assert outcomes[1].tokens == outcomes[2].tokens == outcomes[6].tokens
    assert outcomes[6].forks[:1] == outcomes[2].forks


def test_forced_rows_of_a_group_have_no_outcomes(spec):
    core, backend = hand_core(), tiny_backend(spec)
    core.add(PROMPTS[0], SamplingParams(temperature=1.0, n=3), 8)
    core.add(PROMPTS[1], SamplingParams(temperature=1.0, n=2), 8)
    first, second = core.plan().scheduled
    outcomes = backend.start(plan_of(first.replace(forced=True), second)).wait().outcomes
    alone = backend.start(plan_of(second)).wait().outcomes
    assert outcomes == alone
    assert backend.start(plan_of(first.replace(forced=True))).wait()[0] is None


# --- all at once ---


@pytest.mark.parametrize("seed", range(4))
def test_logits_stay_those_of_the_whole_sequence(spec, reference, seed, monkeypatch):
    """Groups part, are swapped out and in, copied and dropped in one plan, and freed blocks are used again at once."""
    print("seed", seed)
    rng = random.Random(seed)
    core, backend = HandCore(num_gpu_blocks=48, num_cpu_blocks=48), tiny_backend(spec, num_cpu_blocks=48)
    logits_of_step: list[torch.Tensor] = []
    compute = backend.runner.token_logits
    monkeypatch.setattr(
        backend.runner,
        "token_logits",
        lambda hidden, places: logits_of_step.append(compute(hidden, places)) or logits_of_step[-1],
    )
    kinds = [search(3), SamplingParams(temperature=1.0, n=3), SamplingParams(), SamplingParams(temperature=2.0, n=2)]
    num_reused = num_all_at_once = num_fans = 0
    for number in range(60):
        if len(core.groups) < 4 and number < 40:
            prompt = [rng.randrange(512) for _ in range(rng.randrange(1, 14))]
            core.add(prompt, rng.choice(kinds), rng.randrange(3, 12))
        for group in core.groups:
            if not group.is_swapped and group.members[0].num_computed and rng.random() < 0.3:
                core.swap_out(group)
            elif group.is_swapped and rng.random() < 0.7:
                core.swap_in(group)
        plan = core.plan(chunk=5)
        sampled = [
            member.tokens
            for group in core.groups
            if not group.is_swapped
            for member in group.members
            if any(row.seq_id == member.seq_id and row.samples for row in plan.scheduled)
        ]
        outcomes = backend.start(plan).wait().outcomes
        if sampled:
            with torch.inference_mode():
                expected = torch.stack([reference(torch.tensor([tokens])).logits[0, -1] for tokens in sampled])
            torch.testing.assert_close(logits_of_step[-1], expected, atol=TOLERANCE * 10, rtol=0)
        written = [block for _, block in (*plan.swap_in, *plan.copies)]
        num_reused += len({block for block, _ in plan.swap_out} & set(written))
        num_all_at_once += bool(plan.swap_out and plan.swap_in and plan.copies)
        sources = [source for source, _ in plan.copies]
        num_fans += len(sources) > len(set(sources))
        core.commit(outcomes)
    assert num_reused > 5
    assert num_all_at_once > 0
    assert num_fans > 0
