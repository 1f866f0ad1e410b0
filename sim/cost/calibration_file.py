"""Writes a Calibration to a JSON file that a person can review, and reads it back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sim.cost.calibrated import COEFFICIENTS, Calibration, Coefficients, Curve, Quality
from sim.cost.profiled_range import REGIONS, Ranges
from testbed.errors import ProfileError
from testbed.foreign_text import json_object, number, shown, whole
from testbed.output import whole_file
from testbed.specs.profiles import ProfileManifest
from testbed.specs.ranges import MAX_PART_NS

_KIND, _VERSION = "testbed calibrated cost", 5
FORMAT = f"{_KIND} {_VERSION}"
_WRITES = "`testbed calibrate fit <profile> --out <json>` writes one"
MAX_COUNT = 2**40  # of tokens, positions, blocks, steps
MAX_ERROR = 1e15  # of a relative error
_KEYS = (
    "manifest", "decode_curve", "prefill_curve", "coefficients_ns", "repeated_saving", "ranges", "quality", "num_folds",
)  # fmt: skip


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Writes a fit to a file, whole or not at all. Coefficients and curves are in ns."""
    document = {
        "format": FORMAT,
        "manifest": asdict(calibration.manifest),
        "num_folds": calibration.num_folds,
        "quality": {region: quality._asdict() for region, quality in calibration.quality.items()},
        "coefficients_ns": asdict(calibration.coefficients),
        "repeated_saving": calibration.repeated_saving,
        "decode_curve": calibration.decode_curve,
        "prefill_curve": calibration.prefill_curve,
        "ranges": calibration.ranges,
    }
    with whole_file(Path(path)) as part:
        part.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_calibration(path: str | Path) -> Calibration:
    """Reads the file that save_calibration wrote. Raises ProfileError with the file, the field, its value and what was
    expected."""
    file, place = Path(path), f"cost.path: {path}"
    if not file.is_file():
        wrong = f"{path} is a folder; name its calibration file" if file.is_dir() else f"no file at {path}"
        raise ProfileError(f"cost.path: {wrong}; {_WRITES}")
    if file.suffix == ".parquet":
        raise ProfileError(
            f"{place} is no fit, which is a .json; if it is a profile: `testbed calibrate fit {path} --out <fit>.json`"
        )
    document = json_object(file.read_bytes(), place, ProfileError, f"; {_WRITES}")
    if (found := document.get("format")) != FORMAT:
        raise ProfileError(
            f"{place} is no calibrated cost: its 'format' is {shown(found)}; expected {FORMAT!r}"
            f"{_of_version(str(found))}"
        )
    for key in _KEYS:
        if key not in document:
            raise ProfileError(f"{place} lacks {key!r}")
    coefficients = _object(place, "coefficients_ns", document["coefficients_ns"], COEFFICIENTS)
    of_ns = {key: float(_checked(place, f"coefficients_ns.{key}", coefficients[key], _NS)) for key in COEFFICIENTS}
    return Calibration(
        manifest=ProfileManifest.from_json(document["manifest"], f"{place}: manifest"),
        decode_curve=_curve(place, "decode_curve", document["decode_curve"]),
        prefill_curve=_curve(place, "prefill_curve", document["prefill_curve"]),
        coefficients=Coefficients(**of_ns),
        ranges=_ranges(place, document["ranges"]),
        quality=_quality(place, document["quality"]),
        num_folds=_checked(place, "num_folds", document["num_folds"], _count(2)),
        repeated_saving=float(_checked(place, "repeated_saving", document["repeated_saving"], _SHARE)),
    )


def _of_version(found: str) -> str:
    """What another format tells, and what helps."""
    version = re.fullmatch(rf"{_KIND} ([0-9]{{1,9}})", found)
    if version is None:
        return f"; {_WRITES}"
    if int(version[1]) > _VERSION:
        return " (a fit of a newer testbed: update this one, or fit its profile here)"
    return " (an older fit: `testbed calibrate fit <its profile> --out <json>` makes it again)"


Kind = tuple[Callable[[Any], bool], str]  # (whether a value is valid, what is expected)


def _count(least: int) -> Kind:
    return whole(least, MAX_COUNT), f"a whole number, from {least} to {MAX_COUNT:,}"


_NS: Kind = (number(0, MAX_PART_NS), f"a number of ns, from 0 to {MAX_PART_NS:,}")
_SHARE: Kind = (number(0, 1), "a share from 0 to 1")
_PAIR: Kind = (lambda value: isinstance(value, list) and len(value) == 2, "a pair of numbers")


def _refused(place: str, field: str, value: Any, expected: str) -> ProfileError:
    return ProfileError(f"{place}: {field} is {shown(value)}; expected {expected}")


def _checked(place: str, field: str, value: Any, kind: Kind) -> Any:
    is_one, expected = kind
    if not is_one(value):
        raise _refused(place, field, value, expected)
    return value


def _object(place: str, field: str, values: Any, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ProfileError(f"{place}: {field} must hold exactly {', '.join(names)}")
    return values


def _curve(place: str, key: str, points: Any) -> Curve:
    if not isinstance(points, list) or not points:
        raise _refused(place, key, points, "a list of (rows, ns)")
    curve: list[tuple[int, float]] = []
    for index, point in enumerate(points):
        field = f"{key}[{index}]"
        rows, ns = _checked(place, field, point, _PAIR)
        rows, ns = _checked(place, f"{field}[0]", rows, _count(0)), float(_checked(place, f"{field}[1]", ns, _NS))
        if curve and (rows <= curve[-1][0] or ns < curve[-1][1]):
            raise _refused(place, field, point, f"more rows, and no less ns, than {list(curve[-1])} before it")
        curve.append((rows, ns))
    return tuple(curve)


def _ranges(place: str, raw: Any) -> Ranges:
    if not isinstance(raw, dict) or "moves" not in raw or not set(raw) <= set(REGIONS):
        raise _refused(place, "ranges", raw, f"an object with 'moves' and others of {', '.join(REGIONS)}")
    ranges: Ranges = {}
    for region, features in raw.items():
        ranges[region] = {}
        for name, bounds in _object(place, f"ranges.{region}", features, _FEATURES[region]).items():
            field = f"ranges.{region}.{name}"
            low, high = (_checked(place, field, bound, _count(0)) for bound in _checked(place, field, bounds, _PAIR))
            if low > high:
                raise _refused(place, field, bounds, "the lowest before the highest")
            ranges[region][name] = low, high
    return ranges


_DECODES = ("num_decodes", "decode_context_tokens", "longest_decode_context")
_PREFILLS = ("num_tokens", "num_prefills", "prefill_end")
_FEATURES = {
    "decode": _DECODES,
    "prefill": _PREFILLS,
    "mixed": (*_DECODES, *_PREFILLS),
    "moves": ("num_blocks_swapped_out", "num_blocks_swapped_in", "num_blocks_copied"),
}


def _quality(place: str, raw: Any) -> dict[str, Quality]:
    if not isinstance(raw, dict) or "all" not in raw or not set(raw) <= {"all", *REGIONS}:
        raise _refused(place, "quality", raw, f"an object with 'all' and others of {', '.join(REGIONS)}")
    found = {}
    for region, values in raw.items():
        found[region] = Quality(**_object(place, f"quality.{region}", values, Quality._fields))
        for name in ("num_steps", "num_shapes"):
            _checked(place, f"quality.{region}.{name}", values[name], _count(1))
        for name, low in (("median", 0.0), ("p90", 0.0), ("bias", -1.0), ("noise", 0.0)):
            value = values[name]
            if not (number(low, MAX_ERROR)(value) or (name == "noise" and value is None)):
                raise _refused(place, f"quality.{region}.{name}", value, f"a number from {low:g} to {MAX_ERROR:g}")
    return found
