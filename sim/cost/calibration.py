"""Fits a Calibration to a profile, and measures how well it predicts shapes that it was not fitted to. Uses scipy.

Each part of a step (host, swap, forward, sampler) is fitted to its own span, by non-negative least squares on errors
relative to the whole step: (predicted - measured) / expected. `expected` is first the measured time of the step, then
the time that the previous fit predicts. With measured times throughout, noise that only lengthens steps would pull the
fit below the mean, and a run is a sum of steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil

import numpy as np
from numpy.typing import NDArray

from sim.cost.base import attention_pairs_doubled, decode_skew, pairs_doubled
from sim.cost.calibrated import COEFFICIENTS, CalibratedCost, Calibration, Coefficients, Curve, Quality, captured_by
from sim.cost.profiled_range import REGIONS, profiled_ranges
from testbed.core.plan import BatchShape
from testbed.errors import ProfileError
from testbed.specs.profiles import MeasuredStep, Profile, ProfileManifest

MIN_SHAPES = 20
MAX_PIECES = 12  # of a curve
MIN_SHAPES_OF_PIECE = 4
NUM_REWEIGHTINGS = 5  # the weights have settled by then
Floats = NDArray[np.float64]


def calibrate(profile: Profile, num_folds: int = 5) -> Calibration:
    """Fits all steps, and cross-validates. A fold leaves out whole shapes, so that no repeat of a left-out step helps.

    Shapes are assigned to folds by a fixed permutation: the same profile gives the same fit. Raises ProfileError on
    fewer than MIN_SHAPES different shapes.
    """
    manifest, steps = profile
    shapes = list(dict.fromkeys(step.shape for step in steps))
    if len(shapes) < MIN_SHAPES:
        raise ProfileError(
            f"the profile has steps of {len(shapes)} different shapes; a fit needs at least {MIN_SHAPES}: profile more"
        )
    dealt = np.random.Generator(np.random.PCG64(0)).permutation(len(shapes)) % num_folds
    fold_of = dict(zip(shapes, dealt.tolist(), strict=True))
    predicted = np.empty(len(steps))
    for fold in range(num_folds):
        kept = [step for step in steps if fold_of[step.shape] != fold]
        model = CalibratedCost(_fit(manifest, kept, {}, num_folds))
        for index, step in enumerate(steps):
            if fold_of[step.shape] == fold:
                predicted[index] = sum(model.price(step.shape))
    return _fit(manifest, steps, _quality(steps, predicted), num_folds)


def _quality(steps: Sequence[MeasuredStep], predicted: Floats) -> dict[str, Quality]:
    """Returns the errors over all steps and in each region."""
    measured = np.array([step.total_ns for step in steps], dtype=np.float64)
    regions = np.array([step.shape.kind for step in steps])
    found = {}
    for name in ("all", *REGIONS):
        of_region = np.full(len(steps), True) if name == "all" else regions == name
        if not of_region.any():
            continue
        truth, guess = measured[of_region], predicted[of_region]
        errors = np.abs(guess - truth) / truth
        chosen = [step for step, is_in in zip(steps, of_region, strict=True) if is_in]
        found[name] = Quality(
            num_steps=len(chosen),
            num_shapes=len({step.shape for step in chosen}),
            median=float(np.median(errors)),
            p90=float(np.quantile(errors, 0.9)),
            bias=float(guess.sum() / truth.sum() - 1),
            noise=_noise(chosen),
        )
    return found


def _noise(steps: Sequence[MeasuredStep]) -> float | None:
    """Returns the median relative deviation of repeats from the mean of their shape; None without repeats."""
    times: dict[BatchShape, list[int]] = {}
    for step in steps:
        times.setdefault(step.shape, []).append(step.total_ns)
    deviations = [
        abs(ns * len(of_shape) / sum(of_shape) - 1)
        for of_shape in times.values()
        if len(of_shape) > 1
        for ns in of_shape
    ]
    return float(np.median(deviations)) if deviations else None


# --- the fit ---


def _fit(
    manifest: ProfileManifest, steps: Sequence[MeasuredStep], quality: dict[str, Quality], num_folds: int
) -> Calibration:
    shapes = [step.shape for step in steps]
    total = np.array([step.total_ns for step in steps], dtype=np.float64)  # [num_steps]
    targets = np.array([_parts(step) for step in steps], dtype=np.float64)  # [num_steps, num_parts]
    num_rows = captured_by(manifest).rows_of
    knots = {mode: _knots(shapes, mode == "prefill", num_rows) for mode in ("decode", "prefill")}
    matrices = [  # one a part, [num_steps, num_columns], in the order of _parts
        np.array([_host(shape) for shape in shapes], dtype=np.float64),
        np.array([_swap(shape) for shape in shapes], dtype=np.float64),
        np.array([_forward(shape, knots, num_rows, manifest.sliding_window) for shape in shapes], dtype=np.float64),
        np.array([_sampler(shape) for shape in shapes], dtype=np.float64),
    ]
    expected = total
    for _ in range(NUM_REWEIGHTINGS):
        solved = [_solve_relative(matrix, targets[:, part], expected) for part, matrix in enumerate(matrices)]
        predicted = sum(matrix @ found for matrix, found in zip(matrices, solved, strict=True))
        expected = np.maximum(predicted, 0.1 * total)
    host, swap, forward, sampler = (found.tolist() for found in solved)
    num_decode, num_prefill = len(knots["decode"]), len(knots["prefill"])
    curves = [
        _curve(knots["decode"], forward[:num_decode]),
        _curve(knots["prefill"], forward[num_decode : num_decode + num_prefill]),
    ]
    saved_ns, *forward_ns = forward[num_decode + num_prefill :]
    coefficients = Coefficients(**dict(zip(_NAMES, [*forward_ns, *swap, *sampler, *host], strict=True)))
    read_ns = coefficients.decode_context_token
    return Calibration(
        manifest=manifest,
        decode_curve=curves[0] or curves[1] or ((1, 0.0),),
        prefill_curve=curves[1] or curves[0] or ((1, 0.0),),
        coefficients=coefficients,
        ranges=profiled_ranges(shapes),
        quality=quality,
        num_folds=num_folds,
        repeated_saving=min(1.0, saved_ns / read_ns) if read_ns else 0.0,
    )


_NAMES = COEFFICIENTS  # in the order: forward, swap, sampler, host


def _parts(step: MeasuredStep) -> tuple[int, int, int, int]:
    """Returns host, swap, forward and sampler time, which add up to the step. Time that no span covers counts as host
    time. Time that several spans cover is taken off the host time, which overlaps with the device, then off forward."""
    schedule, prepare, swap, forward, sample = step.spans
    host = schedule + prepare + step.total_ns - sum(step.spans)
    if not step.shape.num_blocks_moved:
        host, swap = host + swap, 0  # the time to find that no block is to be moved
    if host < 0:
        forward, host = max(0, forward + host), 0
    return host, swap, forward, sample


def _host(shape: BatchShape) -> tuple[int, ...]:
    num_prefills = len(shape.prefills)
    num_rows = shape.num_decodes + num_prefills
    return 1, num_rows, int(num_prefills > 0), shape.num_prefill_tokens, shape.num_blocks_moved


def _swap(shape: BatchShape) -> tuple[int, ...]:
    num_out, num_in = shape.num_blocks_swapped_out, shape.num_blocks_swapped_in
    return (num_out > 0) + (num_in > 0), num_out, num_in, shape.num_blocks_copied


def _sampler(shape: BatchShape) -> tuple[int, ...]:
    return int(shape.num_samples > 0), shape.num_samples


def _forward(
    shape: BatchShape, knots: dict[str, list[int]], num_rows: Callable[[BatchShape], int], window: int | None
) -> list[float]:
    """Returns the factors of both curves' pieces, that of repeated positions, then those of forward coefficients."""
    has_prefills, num_tokens = bool(shape.prefills), shape.num_tokens
    row: list[float] = []
    for mode, own in knots.items():
        is_mode = num_tokens > 0 and has_prefills == (mode == "prefill")
        row += _pieces(own, num_rows(shape)) if is_mode else [0.0] * len(own)
    return [
        *row,
        0 if has_prefills else -shape.repeated_context_tokens,  # its coefficient is what is saved
        0 if has_prefills else shape.decode_context_tokens,
        0 if has_prefills else decode_skew(shape),
        shape.num_decodes if has_prefills else 0,
        shape.decode_context_tokens if has_prefills else 0,
        decode_skew(shape) if has_prefills else 0,
        len(shape.prefills),
        sum(chunk.start + chunk.num_tokens for chunk in shape.prefills),
        attention_pairs_doubled(shape, window) / 2,
        sum(pairs_doubled(0, chunk.num_tokens, window) for chunk in shape.prefills) / 2,
        shape.num_samples,
    ]


def _pieces(knots: list[int], num_rows: int) -> list[float]:
    """Returns 1 for the curve's value at its first knot, then the share of each piece below num_rows, from 0 to 1."""
    parts = [1.0]
    for low, high in pairwise(knots):
        parts.append(min(1.0, max(0.0, (num_rows - low) / (high - low))))
    return parts


def _knots(shapes: Sequence[BatchShape], has_prefills: bool, num_rows: Callable[[BatchShape], int]) -> list[int]:
    """Returns the rows at which a curve may bend, such that each piece has enough different shapes: a twelfth of all,
    or a few if its rows are twice those of the last bend."""
    distinct = dict.fromkeys(shape for shape in shapes if shape.num_tokens and bool(shape.prefills) == has_prefills)
    counts = Counter(map(num_rows, distinct))
    if not counts:
        return []
    wanted = max(MIN_SHAPES_OF_PIECE, ceil(len(distinct) / MAX_PIECES))
    ascending = sorted(counts)
    knots, in_piece = [ascending[0]], 0
    for value in ascending[1:]:
        in_piece += counts[value]
        is_far = value >= 2 * knots[-1]  # experts: the more rows there are, the fewer new weights one more row reads
        if in_piece >= wanted or (is_far and in_piece >= MIN_SHAPES_OF_PIECE):
            knots.append(value)
            in_piece = 0
    if knots[-1] != ascending[-1]:
        if len(knots) > 1:
            knots.pop()
        knots.append(ascending[-1])
    return knots


def _curve(knots: list[int], increments: list[float]) -> Curve:
    points, value = [], 0.0
    for num_rows, increment in zip(knots, increments, strict=True):
        value += increment
        points.append((num_rows, value))
    return tuple(points)


def _solve_relative(features: Floats, measured: Floats, expected: Floats) -> Floats:
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
