"""Writes a Calibration to a JSON file that a person can review, and reads it back."""

from __future__ import annotations

import json
import re
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
    file = Path(path)
    if not file.is_file():
        wrong = f"{path} is a folder; name its calibration file" if file.is_dir() else f"no file at {path}"
        raise ProfileError(f"cost.path: {wrong}; {_WRITES}")
    if file.suffix == ".parquet":
        raise ProfileError(
            f"cost.path: {path} is no fit, which is a .json; if it is a profile: `testbed calibrate fit {path} --out "
            "<fit>.json`"
        )
    document = json_object(file.read_bytes(), f"cost.path: {path}", ProfileError, f"; {_WRITES}")
    if (found := document.get("format")) != FORMAT:
        raise ProfileError(
            f"cost.path: {path} is no calibrated cost: its 'format' is {shown(found)}; expected {FORMAT!r}"
            f"{_of_version(str(found))}"
        )
    for key in _KEYS:
        if key not in document:
            raise ProfileError(f"cost.path: {path} lacks {key!r}")
    coefficients = _object(path, "coefficients_ns", document, COEFFICIENTS)
    return Calibration(
        manifest=ProfileManifest.from_json(document["manifest"], f"cost.path: {path}: manifest"),
        decode_curve=_curve(path, "decode_curve", document),
        prefill_curve=_curve(path, "prefill_curve", document),
        coefficients=Coefficients(
            **{key: _ns(path, f"coefficients_ns.{key}", coefficients[key]) for key in COEFFICIENTS}
        ),
        ranges=_ranges(path, document["ranges"]),
        quality=_quality(path, document["quality"]),
        num_folds=_whole(path, "num_folds", document["num_folds"], least=2),
        repeated_saving=_share(path, "repeated_saving", document["repeated_saving"]),
    )


def _of_version(found: str) -> str:
    """What another format tells, and what helps."""
    version = re.fullmatch(rf"{_KIND} ([0-9]{{1,9}})", found)
    if version is None:
        return f"; {_WRITES}"
    if int(version[1]) > _VERSION:
        return " (a fit of a newer testbed: update this one, or fit its profile here)"
    return " (an older fit: `testbed calibrate fit <its profile> --out <json>` makes it again)"


def _refused(path: str | Path, field: str, value: Any, expected: str) -> ProfileError:
    return ProfileError(f"cost.path: {path}: {field} is {shown(value)}; expected {expected}")


def _object(path: str | Path, key: str, document: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    values = document[key]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ProfileError(f"cost.path: {path}: {key!r} must hold exactly {', '.join(names)}")
    return values


def _ns(path: str | Path, field: str, value: Any) -> float:
    if not number(0, MAX_PART_NS)(value):
        raise _refused(path, field, value, f"a number of ns, from 0 to {MAX_PART_NS:,}")
    return float(value)


def _share(path: str | Path, field: str, value: Any) -> float:
    if not number(0, 1)(value):
        raise _refused(path, field, value, "a share from 0 to 1")
    return float(value)


def _whole(path: str | Path, field: str, value: Any, least: int = 0) -> int:
    if not whole(least, MAX_COUNT)(value):
        raise _refused(path, field, value, f"a whole number, from {least} to {MAX_COUNT:,}")
    return int(value)


def _pair(path: str | Path, field: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise _refused(path, field, value, "a pair of numbers")
    return value


def _curve(path: str | Path, key: str, document: dict[str, Any]) -> Curve:
    points = document[key]
    if not isinstance(points, list) or not points:
        raise _refused(path, key, points, "a list of (rows, ns)")
    curve: list[tuple[int, float]] = []
    for index, point in enumerate(points):
        field = f"{key}[{index}]"
        rows, ns = _pair(path, field, point)
        rows, ns = _whole(path, f"{field}[0]", rows), _ns(path, f"{field}[1]", ns)
        if curve and (rows <= curve[-1][0] or ns < curve[-1][1]):
            raise _refused(path, field, point, f"more rows, and no less ns, than {list(curve[-1])} before it")
        curve.append((rows, ns))
    return tuple(curve)


def _ranges(path: str | Path, raw: Any) -> Ranges:
    if not isinstance(raw, dict) or "moves" not in raw or not set(raw) <= set(REGIONS):
        raise _refused(path, "ranges", raw, f"an object with 'moves' and others of {', '.join(REGIONS)}")
    ranges: Ranges = {}
    for region, features in raw.items():
        if not isinstance(features, dict) or sorted(features) != sorted(_FEATURES[region]):
            raise ProfileError(f"cost.path: {path}: ranges.{region} must hold exactly {', '.join(_FEATURES[region])}")
        ranges[region] = {}
        for name, bounds in features.items():
            field = f"ranges.{region}.{name}"
            low, high = (_whole(path, field, bound) for bound in _pair(path, field, bounds))
            if low > high:
                raise _refused(path, field, bounds, "the lowest before the highest")
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


def _quality(path: str | Path, raw: Any) -> dict[str, Quality]:
    if not isinstance(raw, dict) or "all" not in raw or not set(raw) <= {"all", *REGIONS}:
        raise _refused(path, "quality", raw, f"an object with 'all' and others of {', '.join(REGIONS)}")
    found = {}
    for region, values in raw.items():
        if not isinstance(values, dict) or sorted(values) != sorted(Quality._fields):
            raise ProfileError(f"cost.path: {path}: quality.{region} must hold exactly {', '.join(Quality._fields)}")
        for name in ("num_steps", "num_shapes"):
            _whole(path, f"quality.{region}.{name}", values[name], least=1)
        for name, low in (("median", 0.0), ("p90", 0.0), ("bias", -1.0), ("noise", 0.0)):
            value = values[name]
            if not (number(low, MAX_ERROR)(value) or (name == "noise" and value is None)):
                raise _refused(path, f"quality.{region}.{name}", value, f"a number from {low:g} to {MAX_ERROR:g}")
        found[region] = Quality(**values)
    return found
