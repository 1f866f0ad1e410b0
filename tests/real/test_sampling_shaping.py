"""What is drawn from: any mix of parameters against a slow reference in float64, and against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from real.sampling import inputs as host_inputs
from real.sampling import sampler
from real.sampling.inputs import Source, sample_inputs, sent
from real.sampling.sampler import choose, shape
from testbed.core.plan import ScheduledSequence
from testbed.core.request import SamplingParams
from tests.real.engine_helpers import drawn_by_row

VOCAB_SIZE = 24
EOS = 3
INFINITY = float("inf")


def row_of(
    seq_id: int, prompt: list[int], output: list[int], sampling: SamplingParams, num_samples: int = 1
) -> ScheduledSequence:
    """The decode step after `prompt` and `output`."""
    known = [*prompt, *output]
    return ScheduledSequence(
        seq_id, len(known) - 1, 1, known[-1:], True, False, [0], sampling, num_samples, seq_id, len(prompt),
        known if sampling.needs_history else (),
    )  # fmt: skip


# --- a reference that knows nothing of batches ---


def reference(logits: list[float], row: ScheduledSequence) -> tuple[list[float], float]:
    """Probabilities of the tokens of one row, and how far the nearest token was from being filtered otherwise."""
    sampling = row.sampling
    known, num_prompt = list(row.history), row.num_prompt_tokens
    scores, margin = list(logits), INFINITY
    biases = dict(sampling.logit_bias)
    ways = [(own, biases.get(i), i in known, known[num_prompt:].count(i)) for i, own in enumerate(logits)]

    def tie_margin(values: list[float], least: float) -> float:
        """0 if tokens are about equal that came to it by different arithmetic: float32 may see them otherwise."""
        near = {way for value, way in zip(values, ways, strict=True) if abs(value - least) <= 1e-6 * abs(least)}
        return INFINITY if len(near) <= 1 else 0.0

    for token, bias in sampling.logit_bias:
        scores[token] += bias
    if row.start + row.num_tokens - num_prompt < sampling.min_tokens:
        for token in (*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])):
            scores[token] = -INFINITY
    for token in range(len(scores)):
        count = known[num_prompt:].count(token)
        if token in known:
            factor = sampling.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    if sampling.temperature == 0:
        best = max(scores)
        rest = [best - score for score in scores if score != best]
        margin = min([*rest, tie_margin(scores, best)])
        return [float(token == scores.index(best)) for token in range(len(scores))], margin
    probs = normalised([math.exp((score - max(scores)) / sampling.temperature) for score in scores])
    if sampling.min_p > 0:
        limit = sampling.min_p * max(probs)
        others = [prob for prob in probs if sampling.min_p < 1 or prob != limit]
        margin = min([margin, tie_margin(probs, limit), *(abs(prob - limit) / max(probs) for prob in others)])
        probs = normalised([prob if prob >= limit else 0.0 for prob in probs])
    if 0 < sampling.top_k < len(probs):
        least = sorted(probs, reverse=True)[sampling.top_k - 1]
        margin = min(margin, tie_margin(probs, least) if least else INFINITY)
        probs = normalised([prob if prob >= least else 0.0 for prob in probs])
    if sampling.top_p < 1:
        total, least = 0.0, 0.0
        for prob in sorted(probs, reverse=True):
            if total >= sampling.top_p:
                margin = min(margin, total - sampling.top_p)
                break
            margin = min(margin, sampling.top_p - total)
            total, least = total + prob, prob
        margin = min(margin, tie_margin(probs, least))
        probs = normalised([prob if prob >= least else 0.0 for prob in probs])
    return probs, margin


def normalised(weights: list[float]) -> list[float]:
    return [weight / math.fsum(weights) for weight in weights]


def shaped(logits: torch.Tensor, rows: list[ScheduledSequence]) -> list[list[float]]:
    """The engine's probabilities of each row's first draw; of a greedy row all of it is on one token."""
    inputs = sample_inputs(rows, Source(logits.shape[-1], eos_token_id=EOS))
    before = logits.clone()
    result = torch.nn.functional.one_hot(choose(logits, inputs)[: len(rows)], logits.shape[-1]).double()
    for group in inputs.groups:
        if group.keys is not None:
            result[group.rows] = shape(logits, group).double().softmax(-1)
    assert torch.equal(logits, before), "the model's logits are kept: log-probabilities are taken from them"
    return result.tolist()


# --- any mix of parameters ---

TOKENS = st.integers(0, VOCAB_SIZE - 1)
GRID = st.integers(-16, 16).map(lambda number: number / 4)  # equals are common
PARAMS = st.builds(
    SamplingParams, temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.05]), top_k=st.sampled_from([0, -1, 1, 3, 7, VOCAB_SIZE, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]), presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.75]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.6, -0.3]), repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(TOKENS, GRID, max_size=3), min_tokens=st.sampled_from([0, 0, 2, 5]),
    stop_token_ids=st.lists(TOKENS, max_size=2), ignore_eos=st.booleans(), seed=st.sampled_from([None, 0, 7]),
)  # fmt: skip
ROWS = st.lists(
    st.tuples(
        st.lists(TOKENS, min_size=1, max_size=6), st.lists(TOKENS, max_size=6), PARAMS,
        st.lists(GRID, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(ROWS)
def test_any_mix_in_one_batch_equals_the_reference(batch):
    rows = [row_of(7 * i, prompt, output, params) for i, (prompt, output, params, _) in enumerate(batch)]
    logits = torch.tensor([own for *_, own in batch])
    for own, row, found in zip(logits.tolist(), rows, shaped(logits, rows), strict=True):
        expected, margin = reference(own, row)
        if margin > 1e-5:
            assert found == pytest.approx(expected, abs=1e-5), row


@settings(max_examples=60, deadline=None)
@given(ROWS, st.randoms(use_true_random=False), st.sampled_from([VOCAB_SIZE, 2 * VOCAB_SIZE + 1, 2**22]))
def test_a_draw_depends_on_nothing_else_in_the_batch(batch, random, max_elements):
    rows = [
        row_of(7 * i, prompt, output, params, num_samples=1 + i % 3)
        for i, (prompt, output, params, _) in enumerate(batch)
    ]
    logits = torch.tensor([own for *_, own in batch])
    source = Source(VOCAB_SIZE, 5, EOS)

    def drawn(order: list[int]) -> dict[int, tuple[int, ...]]:
        chosen = [rows[i] for i in order]
        return dict(zip(order, drawn_by_row(logits[order], sample_inputs(chosen, source)), strict=True))

    alone = {i: drawn([i])[i] for i in range(len(rows))}
    order = random.sample(range(len(rows)), len(rows))
    whole, host_inputs.MAX_NOISE_ELEMENTS = host_inputs.MAX_NOISE_ELEMENTS, max_elements
    try:
        assert drawn(order) == alone
    finally:
        host_inputs.MAX_NOISE_ELEMENTS = whole


@pytest.mark.parametrize("kind", [{"logit_bias": {3: 1.0}}, {"presence_penalty": 1.0}])
def test_draws_for_which_logits_are_copied_are_made_a_few_at_a_time(monkeypatch, kind):
    rows = [row_of(i, [1], [2], SamplingParams(temperature=1.0, seed=i, **kind)) for i in range(5)]
    logits = torch.linspace(1.0, -1.0, VOCAB_SIZE).repeat(5, 1)
    at_once = choose(logits, sample_inputs(rows, Source(VOCAB_SIZE))).tolist()
    monkeypatch.setattr(host_inputs, "MAX_NOISE_ELEMENTS", 2 * VOCAB_SIZE)
    inputs = sample_inputs(rows, Source(VOCAB_SIZE))
    assert [len(group.rows) for group in inputs.groups] == [2, 2, 1]
    assert choose(logits, inputs).tolist() == at_once


def test_the_nucleus_is_of_what_a_rows_own_top_k_has_left():
    """Rows of several top_k share one ranking, as long as the longest."""
    params = [SamplingParams(temperature=1.0, top_k=top_k, top_p=0.7, seed=1) for top_k in (2, 4, 16)]
    rows = [row_of(i, [1], [2], sampling) for i, sampling in enumerate(params)]
    logits = torch.linspace(1.0, -1.0, VOCAB_SIZE).repeat(3, 1)
    found = shaped(logits, rows)
    for own, row, probs in zip(logits.tolist(), rows, found, strict=True):
        assert probs == pytest.approx(reference(own, row)[0], abs=1e-5)
    sizes = [sum(prob > 0 for prob in probs) for probs in found]
    assert sizes[0] < sizes[1] < sizes[2] < 16


def test_forbidden_tokens_are_never_drawn_and_min_tokens_ends():
    sampling = SamplingParams(temperature=5.0, min_tokens=3, stop_token_ids=(1, 2, VOCAB_SIZE), seed=1)
    logits = torch.zeros(200, VOCAB_SIZE)
    for num_output in range(5):
        rows = [row_of(i, [9] * (1 + i), [8] * num_output, sampling) for i in range(200)]
        token_ids = choose(logits, sample_inputs(rows, Source(VOCAB_SIZE, eos_token_id=EOS))).tolist()
        assert bool({1, 2, EOS} & set(token_ids)) == (num_output >= 3)


def test_a_bias_of_a_token_that_the_model_lacks_is_our_own_mistake():
    """The configuration, and each prompt's parameters, were checked before."""
    row = row_of(4, [1], [], SamplingParams(logit_bias={VOCAB_SIZE: 1.0}))
    with pytest.raises(AssertionError, match="biases are of tokens in the model's vocabulary"):
        sample_inputs([row], Source(VOCAB_SIZE))


# --- nobody pays for what others do not use ---


def test_what_nobody_asks_for_is_not_made():
    greedy = SamplingParams(top_p=0.5, top_k=2, min_p=0.1)  # filters do nothing to the largest logit
    plain = SamplingParams(temperature=1.0, top_k=-1, stop_token_ids=(1,))
    inputs = sample_inputs([row_of(0, [1], [2], greedy), row_of(1, [1], [2], plain)], Source(VOCAB_SIZE))
    (group,) = inputs.groups
    assert inputs.needs_argmax
    assert group.rows.tolist() == [1]
    assert (group.edits, group.penalties, group.filters, inputs.logprobs, inputs.prompts) == (None,) * 5
    limited = SamplingParams(temperature=1.0, top_p=0.9, top_k=5)
    inputs = sample_inputs([row_of(0, [1], [2], limited), row_of(1, [1], [2], plain)], Source(VOCAB_SIZE))
    assert not inputs.needs_argmax
    assert sorted(group.num_ranked for group in inputs.groups) == [0, 5]  # and no full sort


def test_everything_is_sent_at_once_and_stays_what_it_was():
    sampling = SamplingParams(temperature=1.0, top_p=0.5, presence_penalty=1.0, logit_bias={2: 1.0}, logprobs=2)
    inputs = sample_inputs(
        [row_of(0, [1, 4], [2], sampling), row_of(1, [1], [2], SamplingParams())], Source(VOCAB_SIZE)
    )
    calls = []

    def send(arrays):
        calls.append(len(arrays))
        return [torch.from_numpy(array) for array in arrays]

    assert str(sent(inputs, send)) == str(inputs)
    assert calls == [18]
    nothing = sample_inputs([row_of(0, [1], [2], SamplingParams())], Source(VOCAB_SIZE))
    assert sent(nothing, send) is nothing


# --- transformers ---


@pytest.mark.parametrize("vocab_size", [50, 151_936])
@pytest.mark.parametrize(
    ("params", "processors"),
    [
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"top_k": 20}, [TopKLogitsWarper(20)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        ({"repetition_penalty": 1.4}, [RepetitionPenaltyLogitsProcessor(1.4)]),
        (
            {"repetition_penalty": 1.2, "temperature": 0.7, "top_k": 20, "top_p": 0.95},
            [
                RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.7), TopKLogitsWarper(20),
                TopPLogitsWarper(0.95),
            ],
        ),
        ({"temperature": 1.5, "min_p": 0.1}, [TemperatureLogitsWarper(1.5), MinPLogitsWarper(0.1)]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_it_is_what_transformers_draws_from(vocab_size, params, processors):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator) * 3
    ids = torch.randint(vocab_size, (3, 9), generator=generator)
    sampling = SamplingParams(**({"temperature": 1.0} | params))
    rows = [row_of(i, own[:5], own[5:], sampling) for i, own in enumerate(ids.tolist())]
    (group,) = sample_inputs(rows, Source(vocab_size)).groups
    found = shape(logits, group).softmax(-1)
    expected = LogitsProcessorList(processors)(ids, logits.clone()).softmax(-1)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


# --- statistics, with fixed seeds: an exact number of trials of a fixed stream ---

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -0.5, 0.2, 0.9, -2.0]
STATISTICS = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(temperature=1.3, top_k=4, min_p=0.05, seed=4),
    SamplingParams(temperature=1.0, min_p=0.2, frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, presence_penalty=0.9, logit_bias={0: -3.1}, top_k=6, top_p=0.95, seed=5),
]


@pytest.mark.parametrize("sampling", STATISTICS, ids=range(len(STATISTICS)))
def test_draws_follow_the_filtered_distribution_and_not_each_other(sampling):
    num_draws = 2500
    row = row_of(2, [0, 5], [1, 1, 5], sampling)
    rows = [row.replace(start=start, history=row.history) for start in range(num_draws)]
    rows = [one.replace(num_prompt_tokens=one.start + 1 - 3, history=[0] * (one.start - 4) + [0, 5, 1, 1, 5])
            for one in rows[4:]]  # fmt: skip
    probs, margin = reference(LOGITS, row)
    assert margin > 1e-4
    inputs = sample_inputs(rows, Source(len(LOGITS), run_seed=5))
    drawn = choose(torch.tensor(LOGITS).repeat(len(rows), 1), inputs)
    counts = torch.bincount(drawn, minlength=len(LOGITS))
    kept = torch.tensor(probs) > 0
    assert not counts[~kept].any()
    expected = torch.tensor(probs, dtype=torch.float64)[kept] * len(rows)
    assert chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-3
    places = torch.cumsum(kept, 0) - 1
    own = places[drawn]
    size = int(kept.sum())
    pairs = torch.bincount(own[1:] * size + own[:-1], minlength=size * size).reshape(size, size)
    assert chi2_contingency(pairs.numpy()).pvalue > 1e-3


# --- on a GPU ---


@pytest.mark.gpu
def test_a_gpu_draws_what_the_cpu_draws_without_a_wait():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 151_936, generator=generator) * 3
    params = [
        SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2, logprobs=5),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.95, logit_bias={5: 2.0}),
        SamplingParams(presence_penalty=1.0, min_tokens=9),
        SamplingParams(temperature=1.2, min_p=0.05, logprobs=0),
    ]
    rows = [row_of(i, [1, 2, 3], [4, 4, 9], params[i % 4]) for i in range(8)]
    inputs = sample_inputs(rows, Source(151_936, eos_token_id=EOS))
    expected = sampler.launch(logits, inputs, lambda places: logits)
    there = sent(inputs, lambda arrays: [torch.from_numpy(array).cuda() for array in arrays])
    on_gpu = logits.cuda()
    _first = sampler.launch(on_gpu, there, lambda places: on_gpu)  # loads kernels; kept, and its memory with it
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sampler.launch(on_gpu, there, lambda places: on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(found.logprobs.logprobs.cpu(), expected.logprobs.logprobs, atol=1e-4, rtol=0)
    assert found.logprobs.ranks.tolist() == expected.logprobs.ranks.tolist()
