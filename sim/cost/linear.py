"""A step's time as a linear function of its shape, with coefficients that are given or fitted to measured steps.

The features are those on which a transformer's work depends linearly: tokens (projections and MLP), decode context (KV
read), pairs of prefill attention, blocks moved. Unlike the roofline, it cannot express that a small batch takes as long
as a slightly larger one (weights are read once).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from sim.cost.base import attention_pairs_doubled, to_ns
from sim.cost.config import COEFFICIENTS, LinearConfig
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape
from testbed.errors import ConfigError
from testbed.foreign_text import json_object, number, shown, whole
from testbed.specs.ranges import MAX_SIZE

MIN_STEPS = 14  # two per coefficient
FORMAT = "testbed linear cost 2"
NUM_REWEIGHTINGS = 5  # the weights have settled by then
MeasuredStep = tuple[BatchShape, int]  # the shape of a step, and its time in ns
Run = dict[str, Any] | None  # what a fit must have in common with a run (model, device, …); None: nothing


@dataclass(frozen=True, slots=True)
class LinearFit:
    """Fitted coefficients, and the relative error |predicted - measured| / measured on steps that a fold left out.

    sliding_window: of the attention in the measured steps; None: it attended to everything.
    """

    config: LinearConfig
    median_relative_error: float
    p90_relative_error: float
    num_steps: int
    num_folds: int
    sliding_window: int | None = None


@mypyc_attr(allow_interpreted_subclasses=True)
class LinearCost:
    """Predicts step times by LinearConfig: swaps and copies of blocks are swap_ns, everything else is forward_ns. A
    step takes at least 1 ns; one that computes and moves nothing takes no time.

    Terms are summed in a fixed order, with copies after all others except swaps, which are rounded on their own. The ns
    of a term are what it adds to the rounded sum.

    sliding_window: of the attention; None: it attends to everything. Raises ConfigError if the file at `config.path`
    was fitted with another window, or to another run.
    """

    def __init__(self, config: LinearConfig, sliding_window: int | None = None, run: Run = None) -> None:
        self._window = sliding_window
        self.config = config = config if config.path is None else load_linear(config.path, sliding_window, run)
        self._base_ns = config.base_s * 1e9
        self._prefill_ns = config.per_prefill_token_s * 1e9
        self._decode_ns = config.per_decode_s * 1e9
        self._context_ns = config.per_decode_context_token_s * 1e9
        self._half_pair_ns = config.per_prefill_attention_pair_s * 1e9 / 2
        self._swap_ns = config.per_swapped_block_s * 1e9
        self._copy_ns = config.per_copied_block_s * 1e9

    def price(self, shape: BatchShape) -> Spans:
        if shape.is_empty:
            return Spans()
        forward = self._base_ns + shape.num_decodes * self._decode_ns + shape.decode_context_tokens * self._context_ns
        if shape.prefills:
            doubled_pairs = attention_pairs_doubled(shape, self._window)
            forward = forward + shape.num_prefill_tokens * self._prefill_ns + doubled_pairs * self._half_pair_ns
        forward_ns = to_ns(forward)
        num_swapped = shape.num_blocks_swapped_out + shape.num_blocks_swapped_in
        swap_ns = to_ns(num_swapped * self._swap_ns) if num_swapped else 0
        if shape.num_blocks_copied:
            swap_ns += to_ns(forward + shape.num_blocks_copied * self._copy_ns) - forward_ns
        return Spans(0, 0, swap_ns, forward_ns or (0 if swap_ns else 1), 0)

    def breakdown(self, shape: BatchShape) -> dict[str, int]:
        """Returns the ns of each term; their sum is that of price(shape)."""
        terms = {
            "base": 0.0 if shape.is_empty else self._base_ns,
            "decodes": shape.num_decodes * self._decode_ns,
            "decode_context": shape.decode_context_tokens * self._context_ns,
            "prefill_tokens": shape.num_prefill_tokens * self._prefill_ns,
            "prefill_attention": attention_pairs_doubled(shape, self._window) * self._half_pair_ns,
            "block_copy": shape.num_blocks_copied * self._copy_ns,
        }
        parts, running, rounded = {}, 0.0, 0
        for name, term in terms.items():
            running = running + term
            parts[name], rounded = to_ns(running) - rounded, to_ns(running)
        spans = self.price(shape)
        parts["base"] += spans.forward_ns - (rounded - parts["block_copy"])  # a step lasts at least 1 ns
        return parts | {"swap": spans.swap_ns - parts["block_copy"]}


def fit_linear(steps: Sequence[MeasuredStep], num_folds: int = 5, *, sliding_window: int | None = None) -> LinearFit:
    """Fits the coefficients by non-negative least squares on the relative error, and cross-validates the fit.

    Steps are assigned to folds by a fixed permutation, so the same steps give the same fit. A coefficient whose feature
    never occurs in `steps` becomes 0. Raises ConfigError on fewer than MIN_STEPS steps, a time that is not positive, or
    a num_folds that is not from 2 to the number of steps.
    """
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"a linear cost needs at least {MIN_STEPS} measured steps, found {len(steps)}; profile more")
    for position, (_, measured_ns) in enumerate(steps):
        if measured_ns <= 0:
            raise ConfigError(f"measured step {position} took {measured_ns} ns; it must be above 0")
    if not 2 <= num_folds <= len(steps):
        raise ConfigError(f"num_folds is {num_folds}; it must be from 2 to the number of steps ({len(steps)})")
    features = np.array(
        [_features(shape, sliding_window) for shape, _ in steps], dtype=np.float64
    )  # [num_steps, num_coefficients]
    measured = np.array([measured_ns for _, measured_ns in steps], dtype=np.float64)  # [num_steps]
    fold = np.random.Generator(np.random.PCG64(0)).permutation(len(steps)) % num_folds
    errors = np.empty(len(steps))
    for index in range(num_folds):
        out = fold == index
        predicted = features[out] @ _solve(features[~out], measured[~out])
        errors[out] = np.abs(predicted - measured[out]) / measured[out]
    coefficients = (_solve(features, measured) / 1e9).tolist()
    return LinearFit(
        config=LinearConfig(**dict(zip(COEFFICIENTS, coefficients, strict=True))),
        median_relative_error=float(np.median(errors)),
        p90_relative_error=float(np.quantile(errors, 0.9)),
        num_steps=len(steps),
        num_folds=num_folds,
        sliding_window=sliding_window,
    )


def save_fit(fit: LinearFit, path: str | Path, **about: Any) -> None:
    """Writes a fit as JSON. about: its origin, written as it is given (model, device, command, ...)."""
    quality = {name: value for name, value in asdict(fit).items() if name != "config"}
    coefficients = {name: getattr(fit.config, name) for name in COEFFICIENTS}
    document = {"format": FORMAT, "coefficients": coefficients, **quality, "about": about}
    Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def error_of_fit(path: str | Path) -> tuple[float, float] | None:
    """Returns median and P90 of the relative errors of left-out steps, of a file that load_linear has read; None if it
    does not have them."""
    document = json.loads(Path(path).read_bytes())
    found = [document.get(name) for name in ("median_relative_error", "p90_relative_error")]
    return (float(found[0]), float(found[1])) if all(number(0, inf)(value) for value in found) else None


def load_linear(path: str | Path, sliding_window: int | None = None, run: Run = None) -> LinearConfig:
    """Returns the coefficients of a file that save_fit wrote.

    Raises ConfigError with the file and the fault, also if it was fitted with another window than `sliding_window`, or
    to another run than `run`.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"cost.path: no file at {path}; `make demo` writes one, linear-cost.json, beside its report")
    document = json_object(file.read_bytes(), f"cost.path: {path}", ConfigError)
    if (found := document.get("format")) != FORMAT:
        raise ConfigError(
            f"cost.path: {path} is no linear cost: its 'format' is {shown(found)}; expected {FORMAT!r}: fit it again"
            f"{', or use it with cost=calibrated' if 'calibrated' in str(found) else ''}"
        )
    _check_window(document, path, sliding_window)
    about = found if isinstance(found := document.get("about"), dict) else {}
    for name, value in (run or {}).items():
        if about.get(name, value) != value:
            raise ConfigError(
                f"cost.path: {path} was fitted with {name} {shown(about[name])}, and the run has {shown(value)}; "
                "choose what was measured, or measure this with `testbed calibrate`"
            )
    coefficients = document.get("coefficients")
    if not isinstance(coefficients, dict) or sorted(coefficients) != sorted(COEFFICIENTS):
        raise ConfigError(f"cost.path: {path}: 'coefficients' must hold exactly {', '.join(COEFFICIENTS)}")
    for name, value in coefficients.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"cost.path: {path}: {name} is {shown(value)}; it must be a number")
    try:
        return LinearConfig(**coefficients)
    except ConfigError as error:
        raise ConfigError(f"cost.path: {path}: {error}") from None


def _check_window(document: dict[str, Any], path: str | Path, wanted: int | None) -> None:
    fitted = document.get("sliding_window", "missing")
    if fitted is not None and not whole(1, MAX_SIZE)(fitted):
        raise ConfigError(
            f"cost.path: {path}: 'sliding_window' is {shown(fitted)}; it must be a number of tokens or null"
        )
    if fitted != wanted:
        said = ["null" if window is None else window for window in (fitted, wanted)]
        way = "" if fitted is None else f"set cache.sliding_window={fitted}, or "
        raise ConfigError(
            f"cost.path: {path} was fitted with sliding_window {said[0]}, and the run has {said[1]}; {way}fit this"
        )


def _features(shape: BatchShape, window: int | None) -> tuple[float, ...]:
    """Returns the factor of each coefficient, in the order of COEFFICIENTS."""
    return (
        1,
        shape.num_prefill_tokens,
        shape.num_decodes,
        shape.decode_context_tokens,
        attention_pairs_doubled(shape, window) / 2,
        shape.num_blocks_swapped_out + shape.num_blocks_swapped_in,
        shape.num_blocks_copied,
    )


def _solve(features: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns coefficients x >= 0, in ns. The expected times are first the measured ones, then those that the previous
    fit predicts: with measured times throughout, noise that only lengthens steps would pull the fit below the mean.
    """
    expected = measured
    for _ in range(NUM_REWEIGHTINGS):
        found = solve_relative(features, measured, expected)
        expected = np.maximum(features @ found, 0.1 * measured)
    return found


def solve_relative(
    features: NDArray[np.float64], measured: NDArray[np.float64], expected: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns x >= 0 that minimises sum(((features @ x - measured) / expected)**2); 0 for a column of zeros."""
    from scipy.optimize import nnls  # slow to import, and a simulation does not need it

    relative = features / expected[:, None]
    scale = np.abs(relative).max(axis=0, initial=0.0)
    used = scale > 0
    found = np.zeros(features.shape[1])
    if used.any():
        solution, _ = nnls(relative[:, used] / scale[used], measured / expected, maxiter=50 * features.shape[1])
        found[used] = solution / scale[used]
    return found
