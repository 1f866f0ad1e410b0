"""Sampling parameters: how tokens are sampled and when a sequence stops. Owns the parameters and their ranges.

Names and meanings are those of vLLM's SamplingParams; docs/sampling.md has the table and the order of the operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral, Real
from sys import float_info
from typing import Any

from testbed.checks import require
from testbed.errors import RequestError
from testbed.foreign_text import shown

INT32_MAX = 2**31 - 1
_LISTS = {  # what each must be
    "stop": "a string or strings",
    "stop_token_ids": "a list of token ids",
    "logit_bias": "token ids, each with a number",
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled and when a sequence stops. Raises RequestError, naming the field, for an invalid value.

    temperature: 0 is greedy; the filters (min_p, top_k, top_p) then have no effect. max_tokens: None means up to the
    model's length. stop_token_ids: end a sequence and stay in its output. seed: None derives one from the run's seed.
    n: sequences generated from the prompt. best_of: generates that many instead; the text layer returns the n with the
    largest sums of log-probabilities. beam_width: 0 disables beam search; otherwise the number of beams kept at each
    step. The text layer ranks beam hypotheses by sum / length ** length_penalty.

    min_p: excludes tokens less likely than this share of the most likely one. top_k: keeps only that many of the most
    likely tokens (0 or -1: all). top_p: keeps the smallest set of most likely tokens whose probabilities sum to at
    least this. presence_penalty: subtracted once from the logit of each emitted token; frequency_penalty: once for each
    occurrence. repetition_penalty: divides positive logits of tokens in the prompt or the output, multiplies negative
    ones. logit_bias: (token id, value added to its logit) pairs; a mapping is accepted. min_tokens: tokens that end the
    sequence are not sampled before that many tokens.

    logprobs: k returns the log-probability of each emitted token and of the k most likely ones; None: none.
    prompt_logprobs: the same for the prompt, which is then computed without prefix-cache hits. Both refer to the
    model's own distribution, before any of these parameters is applied.

    stop: strings that end a sequence; a string, or any iterable of strings, becomes a tuple. Only the text layer uses
    stop, include_stop_str_in_output and skip_special_tokens. None for stop, stop_token_ids or logit_bias: nothing.
    """

    temperature: float = 0.0
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    length_penalty: float = 1.0

    # --- for backends ---

    @property
    def num_seqs(self) -> int:
        """Largest number of sequences that are generated from the prompt at the same time."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_filtered(self) -> bool:
        """Whether sampling is limited to a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def is_penalised(self) -> bool:
        """Whether earlier tokens of the sequence change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_history(self) -> bool:
        """Whether a backend needs all tokens so far of the sequence, in addition to those that it computes."""
        return self.is_penalised or self.prompt_logprobs is not None

    @property
    def needs_logprobs(self) -> bool:
        """Whether a backend returns each emitted token's log-probability: requested, or needed to rank sequences."""
        return self.logprobs is not None or (self.best_of or self.n) > self.n or self.beam_width > 0

    # --- checks ---

    def __post_init__(self) -> None:
        self._normalise()
        self._check_groups()
        self._check_range("temperature", 0.0, inf, "0 (greedy) or above")
        self._check_range("top_p", 0.0, 1.0, "above 0 and at most 1", excludes_low=True)
        self._check_range("min_p", 0.0, 1.0, "from 0 to 1")
        self._check_range("presence_penalty", -2.0, 2.0, "from -2 to 2")
        self._check_range("frequency_penalty", -2.0, 2.0, "from -2 to 2")
        self._check_range("repetition_penalty", 0.0, inf, "above 0", excludes_low=True)
        self._check_range("length_penalty", -10.0, 10.0, "from -10 to 10")  # a million tokens ** 10 fit a float
        self._check_count("top_k", -1, "at least 1, or 0 or -1 for no limit")
        self._check_count("max_tokens", 1, "at least 1", optional=True)
        self._check_count("min_tokens", 0, "0 or above")
        self._check_count("logprobs", 0, "0 or above, or null", optional=True)
        self._check_count("prompt_logprobs", 0, "0 or above, or null", optional=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            is_flag = type(value).__name__ in ("bool", "bool_")  # NumPy's have either name
            require(f"sampling.{name}", value, is_flag, "true or false", RequestError)
        has_seed = self.seed is None or _is_whole(self.seed)
        require("sampling.seed", self.seed, has_seed, "a whole number, or null", RequestError)
        is_below = self.max_tokens is None or self.min_tokens <= self.max_tokens
        most = f"at most max_tokens ({self.max_tokens})"
        require("sampling.min_tokens", self.min_tokens, is_below, most, RequestError)
        if any(not text for text in self.stop):
            raise RequestError("sampling.stop has an empty string; a stop string must have at least one character")
        for token in self.stop_token_ids:
            _check_token("sampling.stop_token_ids", token)
        self._check_bias()

    def _normalise(self) -> None:
        """Converts lists and other iterables to tuples, so that equal parameters compare equal and are hashable."""
        for name, expected in _LISTS.items():
            value: Any = getattr(self, name)
            if name == "stop" and isinstance(value, str):
                value = (value,)
            elif name == "logit_bias" and isinstance(value, Mapping):
                value = value.items()
            elif value is None:  # the default of OpenAI and vLLM
                value = ()
            is_list = isinstance(value, Iterable) and not isinstance(value, str)
            require(f"sampling.{name}", value, is_list, expected, RequestError)
            object.__setattr__(self, name, tuple(value))
        are_texts = all(isinstance(text, str) for text in self.stop)
        require("sampling.stop", self.stop, are_texts, _LISTS["stop"], RequestError)
        try:
            object.__setattr__(self, "logit_bias", tuple([(token, value) for token, value in self.logit_bias]))
        except (TypeError, ValueError):
            require("sampling.logit_bias", self.logit_bias, False, _LISTS["logit_bias"], RequestError)

    def _check_groups(self) -> None:
        self._check_count("n", 1, "at least 1")
        self._check_count("best_of", self.n, f"at least n ({self.n})", optional=True)
        is_width = _is_whole(self.beam_width) and (self.beam_width == 0 or self.beam_width >= self.n)
        expected = f"0 (no beam search) or at least n ({self.n})"
        require("sampling.beam_width", self.beam_width, is_width, expected, RequestError)
        if self.beam_width and self.best_of is not None:
            raise RequestError("sampling.best_of and sampling.beam_width exclude each other; set one")
        if self.beam_width and (self.is_penalised or self.logit_bias):
            raise RequestError(
                "sampling.beam_width excludes penalties and logit_bias: hypotheses are ranked by the model's own "
                "probabilities; set beam_width=0 or leave them out"
            )

    def _check_range(self, name: str, low: float, high: float, wanted: str, *, excludes_low: bool = False) -> None:
        value = getattr(self, name)
        is_good = isinstance(value, Real) and not isinstance(value, bool)
        is_good = is_good and (abs(value) <= float_info.max if isinstance(value, int) else isfinite(value))
        is_good = is_good and (low < value if excludes_low else low <= value) and value <= high
        require(f"sampling.{name}", value, is_good, wanted, RequestError)

    def _check_count(self, name: str, least: int, wanted: str, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        most = f", at most {INT32_MAX}" if _is_whole(value) and value > INT32_MAX else ""
        kind = "" if _is_whole(value) else "a whole number, "
        is_good = _is_whole(value) and least <= value <= INT32_MAX
        require(f"sampling.{name}", value, is_good, f"{kind}{wanted}{most}", RequestError)

    def _check_bias(self) -> None:
        for token, value in self.logit_bias:
            _check_token("sampling.logit_bias", token)
            is_bias = isinstance(value, Real) and not isinstance(value, bool) and -100 <= value <= 100
            require(f"sampling.logit_bias of token {token}", value, is_bias, "a number from -100 to 100", RequestError)
        if len(dict(self.logit_bias)) != len(self.logit_bias):
            raise RequestError("sampling.logit_bias names a token twice; give one bias for each")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_token(field: str, token: Any) -> None:
    if not _is_whole(token) or not 0 <= token <= INT32_MAX:
        raise RequestError(f"{field} has the token {shown(token)}; token ids are whole, from 0 to {INT32_MAX}")


GREEDY = SamplingParams()
