"""Oracles: predictors of output lengths. The only module of the policies that may read the true length."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from mypy_extensions import mypyc_attr

from testbed.checks import MAX_SEED, require, require_whole, require_whole_or_null
from testbed.core.sequence import Sequence
from testbed.errors import ConfigError
from testbed.foreign_text import Unchecked
from testbed.policies.context import LengthOracle, PolicyContext
from testbed.streams import draw, log_normal


@mypyc_attr(allow_interpreted_subclasses=True)
class NoOracle:
    """Predicts nothing."""

    def predict(self, seq: Sequence) -> int | None:
        return None


@mypyc_attr(allow_interpreted_subclasses=True)
class Perfect:
    """The true output length: that of the forced output, else the most that the request and the model's length allow.

    A request that is not forced may stop earlier, which cannot be known in advance.
    """

    def __init__(self) -> None:
        self._max_model_len: int | None = None

    def bind(self, context: PolicyContext) -> None:
        self._max_model_len = context.limits.max_model_len

    def predict(self, seq: Sequence) -> int:
        assert self._max_model_len is not None, "bind comes before the first prediction"
        request = seq.request
        wanted = request.sampling.max_tokens if request.forced_output is None else len(request.forced_output)
        limit = max(1, self._max_model_len - seq.num_prompt_tokens)
        return limit if wanted is None else min(wanted, limit)


@mypyc_attr(allow_interpreted_subclasses=True)
class Noisy:
    """The true length times a log-normal factor of median 1, rounded, at least 1.

    sigma: standard deviation of the factor's logarithm; 0: no noise. The factor is a function of seed and request id,
    so every call for a request returns the same length. seed: None takes the run's seed.
    """

    def __init__(self, sigma: Unchecked = 0.5, seed: Unchecked = None) -> None:
        is_good = isinstance(sigma, int | float) and sigma >= 0
        require("scheduler.oracle.sigma", sigma, is_good, "a finite number of at least 0")
        require_whole_or_null("scheduler.oracle.seed", seed, 0, MAX_SEED)
        self._sigma = sigma
        self._own_seed = seed
        self._seed = seed
        self._truth = Perfect()

    def bind(self, context: PolicyContext) -> None:
        self._truth.bind(context)
        self._seed = context.seed if self._own_seed is None else self._own_seed

    def predict(self, seq: Sequence) -> int:
        assert self._seed is not None, "bind comes before the first prediction"
        factor = log_normal(draw(self._seed, "oracle", seq.request_id), self._sigma)
        return max(1, round(self._truth.predict(seq) * factor))


@mypyc_attr(allow_interpreted_subclasses=True)
class Binned:
    """The true length rounded up to the edge of its bin.

    edges: inclusive upper edges; longer outputs fall into the last bin. Without edges: first, first * ratio, ...
    """

    def __init__(self, edges: Unchecked = None, first: Unchecked = 16, ratio: Unchecked = 2) -> None:
        if edges is not None and not _rises(edges):
            raise ConfigError(
                f"scheduler.oracle.edges is {list(edges)}; give rising whole numbers, the first at least 1"
            )
        self._edges: list[int] | None = None if edges is None else list(edges)
        self._first: int = require_whole("scheduler.oracle.first", first, 1)
        self._ratio: int = require_whole("scheduler.oracle.ratio", ratio, 2)
        self._truth = Perfect()

    def bind(self, context: PolicyContext) -> None:
        self._truth.bind(context)

    def predict(self, seq: Sequence) -> int:
        length = self._truth.predict(seq)
        if self._edges is not None:
            return self._edges[min(bisect_left(self._edges, length), len(self._edges) - 1)]
        edge = self._first
        while edge < length:
            edge *= self._ratio
        return edge


def _rises(edges: Unchecked) -> bool:
    """Whether this is at least one number, and all are whole, above 0 and in rising order."""
    return bool(edges) and all(isinstance(edge, int) for edge in edges) and all(a < b for a, b in pairwise([0, *edges]))


def has_no_opinion(oracle: LengthOracle) -> bool:
    """Whether the oracle never predicts anything; a user's own class declares it by an attribute `is_none`."""
    return isinstance(oracle, NoOracle) or bool(getattr(oracle, "is_none", False))
