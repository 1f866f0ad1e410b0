"""Sampling through the whole engine: log-probabilities are transformers', and preemption changes no draw."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from transformers import Qwen3ForCausalLM

from testbed.core.interfaces import PreemptionChoice
from testbed.core.outcome import Finished
from testbed.core.request import Request
from testbed.policies.preemption import Recompute, Swap
from tests.real.engine_helpers import checkpoint, requests_of, tiny_backend, tiny_spec
from tests.real.served import Requests, served
from tests.testbed.core_kit import make_limits

EOS = 3
NUM_TOKENS = 12
RNG = random.Random(5)
SHARED = [RNG.randrange(512) for _ in range(17)]
PROMPTS = [SHARED + [RNG.randrange(512) for _ in range(n)] for n in (3, 12, 1, 20, 7, 9)]
PROMPTS += [SHARED[:16], [5], SHARED[:9], [7, 7, 7, 1], SHARED[:3]]
STOPS = tuple(range(0, 512, 5))
KINDS = [
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.3, "logprobs": 2},
    {"repetition_penalty": 1.5, "min_tokens": 6, "stop_token_ids": STOPS},
    {"temperature": 1.0, "min_p": 0.05, "n": 3, "frequency_penalty": 0.5, "logprobs": 0},
    {"temperature": 1.2, "top_k": 9, "presence_penalty": 1.5, "logit_bias": {7: 3.0}},
    {"prompt_logprobs": 3, "frequency_penalty": 2.0},
    {"temperature": 0.8, "top_p": 0.7, "n": 2, "best_of": 4},
    {"temperature": 1.5, "min_tokens": 4, "stop_token_ids": STOPS, "logprobs": 5, "prompt_logprobs": 0},
    {"beam_width": 3, "n": 2, "min_tokens": 3, "stop_token_ids": STOPS, "logprobs": 4},
    {"n": 3},  # greedy: three times the same
    {"beam_width": 4, "stop_token_ids": tuple(range(0, 512, 9))},
    {"beam_width": 1},
]

PREEMPTION = {"recompute": Recompute(), "swap": Swap(), None: None}


class Ends(Requests):
    """Also keeps all that is said of what finished, who was preempted and how, and what each request hit."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(requests)
        self.done: dict[str, Finished] = {}
        self.preempted: dict[str, set[str]] = {"recompute": set(), "swap": set()}  # request ids, by how
        self.cached: dict[str, int] = {}

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        self.done |= {item.request.request_id: item for item in finished}

    def committed(self, step) -> None:
        super().committed(step)
        for one in step.plan.preempted:
            self.preempted[one.mode.value].add(one.request_id)
        for admission in step.plan.admitted:
            self.cached[admission.request_id] = max(
                self.cached.get(admission.request_id, 0), admission.num_cached_tokens
            )


def serve_on_engine(
    spec, requests: list[Request], composition: str, num_blocks: int, *, caching: bool = True, budget: int = 64,
    preemption: PreemptionChoice | None = None,
) -> Ends:  # fmt: skip
    backend = tiny_backend(spec, num_gpu_blocks=num_blocks, num_cpu_blocks=200, max_num_seqs=16)
    return served(
        backend, Ends(requests), composition, num_blocks=num_blocks, num_cpu_blocks=200, caching=caching,
        eos_token_id=EOS, limits=make_limits(seqs=16, budget=budget, model_len=256), preemption=preemption,
    )  # fmt: skip


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("qwen3"), tiny_spec(eos_token_id=EOS))


@pytest.fixture(scope="module")
def reference(spec):
    return Qwen3ForCausalLM.from_pretrained(spec.path, dtype=torch.float32).eval()


def log_probs(reference, tokens: list[int]) -> torch.Tensor:
    """Row i predicts token i + 1: float64 [len(tokens), vocab]."""
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].double().log_softmax(-1)


def check_logprobs(found, expected: torch.Tensor, token: int, num_top: int) -> None:
    """One token's against float64 [vocab]."""
    assert found.logprob == pytest.approx(expected[token].item(), abs=1e-4)
    assert found.rank == 1 + int((expected > expected[token]).sum())
    values, tokens = expected.topk(num_top)
    assert [one[0] for one in found.top] == tokens.tolist()
    assert [one[1] for one in found.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def alone(spec) -> dict[str, Finished]:
    """Each request by itself."""
    done: dict[str, Finished] = {}
    for request in requests_of(KINDS, PROMPTS, NUM_TOKENS):
        done |= serve_on_engine(spec, [request], "prefill_first", 64, caching=False).done
    return done


def said(done: dict[str, Finished]) -> dict[str, list[tuple[list[int], str]]]:
    """Tokens and reasons of every sequence."""
    return {
        name: sorted((list(one.token_ids), one.reason.value) for one in item.completions) for name, item in done.items()
    }


# --- log-probabilities ---


def test_emitted_tokens_come_with_what_transformers_gives_them(alone, reference):
    for item in alone.values():
        sampling = item.request.sampling
        prompt = list(item.request.prompt_token_ids)
        for one in item.completions:
            output = list(one.token_ids)
            assert len(one.logprobs) == (len(output) if sampling.needs_logprobs else 0)
            expected = log_probs(reference, prompt + output)[len(prompt) - 1 :]
            for found, own, token in zip(one.logprobs, expected, output, strict=False):
                check_logprobs(found, own, token, sampling.logprobs or 0)
            total = sum(own[token].item() for own, token in zip(expected, output, strict=False))
            assert one.cumulative_logprob == pytest.approx(total if sampling.needs_logprobs else 0.0, abs=1e-3)
    assert {len(item.completions) for item in alone.values()} >= {1, 3, 4}


@pytest.mark.parametrize("budget", [64, 7])
@pytest.mark.parametrize("composition", ["decode_first", "unified"])
def test_prompts_are_scored_whole_whatever_is_cached_or_chunked(spec, reference, composition, budget):
    prompts = [PROMPTS[3], PROMPTS[3], PROMPTS[3], PROMPTS[4]]
    kinds = [{}, {"prompt_logprobs": 2, "n": 2}, {}, {"prompt_logprobs": 0}]
    requests = [one.replace(arrival_ns=10**8 * i) for i, one in enumerate(requests_of(kinds, prompts, NUM_TOKENS))]
    ends = serve_on_engine(spec, requests, composition, 64, budget=budget)
    assert ends.cached["r1"] == ends.cached["r3"] == 0
    assert ends.cached["r2"] > 0  # and others go on to hit what is cached
    for name, num_top in (("r1", 2), ("r3", 0)):
        prompt = list(ends.done[name].request.prompt_token_ids)
        first, *found = ends.done[name].prompt_logprobs
        assert first is None
        for one, own, token in zip(found, log_probs(reference, prompt), prompt[1:], strict=False):
            check_logprobs(one, own, token, num_top)
        assert len(found) == len(prompt) - 1
    assert ends.done["r0"].prompt_logprobs == ()


def test_a_forced_output_still_scores_its_prompt(spec, reference):
    request = requests_of([{"prompt_logprobs": 1, "logprobs": 1}], PROMPTS, NUM_TOKENS)[0]
    request = request.replace(forced_output=array("i", [9, 8, 7]))
    done = serve_on_engine(spec, [request], "unified", 64).done["r0"]
    assert list(done.output_token_ids) == [9, 8, 7]
    assert done.completions[0].logprobs == ()
    expected = log_probs(reference, PROMPTS[0])
    for one, own, token in zip(done.prompt_logprobs[1:], expected, PROMPTS[0][1:], strict=False):
        check_logprobs(one, own, token, 1)


# --- preemption, caching, company ---


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize(("num_blocks", "mode"), [(34, "recompute"), (34, "swap"), (200, None)])
@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified"])
def test_every_request_gets_what_it_gets_alone(spec, alone, composition, num_blocks, mode, caching):
    """A search, which cannot be recomputed, is always swapped."""
    ends = serve_on_engine(
        spec, requests_of(KINDS, PROMPTS, NUM_TOKENS), composition, num_blocks, caching=caching,
        preemption=PREEMPTION[mode],
    )  # fmt: skip
    assert said(ends.done) == said(alone)
    for how, names in ends.preempted.items():
        assert any(alone[name].request.sampling.is_penalised for name in names) == (how == mode)
    assert (ends.num_cached_tokens > 0) == caching
    assert ends.num_copied > 0
    assert ends.num_swapped_in == ends.num_swapped_out
    for name, item in alone.items():
        close = pytest.approx([one.logprob for one in item.prompt_logprobs[1:]], abs=1e-4)
        assert [one.logprob for one in ends.done[name].prompt_logprobs[1:]] == close
        sums = sorted(one.cumulative_logprob for one in ends.done[name].completions)
        assert sums == pytest.approx(sorted(one.cumulative_logprob for one in item.completions), abs=1e-3)


# --- transformers' generate ---


@pytest.mark.parametrize("penalty", [1.2, 1.6])
def test_penalised_greedy_output_is_that_of_transformers(spec, reference, penalty):
    ends = serve_on_engine(
        spec, requests_of([{"repetition_penalty": penalty, "ignore_eos": True}], PROMPTS, NUM_TOKENS), "unified", 200
    )
    for item in ends.done.values():
        assert list(item.output_token_ids) == generated(
            reference, list(item.request.prompt_token_ids), repetition_penalty=penalty, eos_token_id=None
        )


def test_min_tokens_is_that_of_transformers(spec, reference):
    kind = {"min_tokens": 5, "stop_token_ids": STOPS, "repetition_penalty": 1.6}
    ends = serve_on_engine(spec, requests_of([kind], PROMPTS, NUM_TOKENS), "unified", 200)
    lengths = []
    for item in ends.done.values():
        output = list(item.output_token_ids)
        prompt = list(item.request.prompt_token_ids)
        options = {"min_new_tokens": 5, "eos_token_id": [*STOPS, EOS], "repetition_penalty": 1.6}
        assert output == generated(reference, prompt, **options)
        lengths.append(len(output))
    assert 5 < min(lengths) < NUM_TOKENS


def generated(reference, prompt: list[int], **options) -> list[int]:
    ids = torch.tensor([prompt])
    output = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, **options
    )
    return output[0, len(prompt) :].tolist()
