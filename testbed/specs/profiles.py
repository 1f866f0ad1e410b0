"""Profiles: measured steps of a real engine, to which cost models are fitted. Owns the schema, its writer, its reader.

A profile is one Parquet file with one row for each measured step (COLUMNS): the integers of its BatchShape, its spans,
its time from plan to commit, and the number of the repeat of its shape. The file's metadata has, under the key
`testbed.profile`, a JSON object with the fields of ProfileManifest: what was measured, on which device, and how.
docs/calibration.md documents both. Knows no cost model and no engine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError, ProfileError
from testbed.foreign_text import json_object, shown, unknown, whole
from testbed.output import whole_file
from testbed.specs.model import DTYPE_BYTES, EXPERTS_FIELDS, KV_DTYPE_BYTES, ModelSpec, RopeScaling
from testbed.specs.ranges import MAX_PART_NS, MAX_SIZE

FORMAT = 2
METADATA_KEY = "testbed.profile"
_PREFILLS, _REPEATED = "list<struct<start, num_tokens>>", "repeated_context_tokens"

COLUMNS: dict[str, str] = {
    "num_decodes": "int32",  # rows of one token of sequences whose prompt is computed
    "decode_context_tokens": "int64",  # positions that they attended to, their own included; summed
    "longest_decode_context": "int64",  # positions that the longest of them attended to; 0: not known
    _REPEATED: "int64",  # of all positions, those whose K and V another of them reads too, but for one decode each
    "prefills": _PREFILLS,  # each prompt or chunk: positions before it (within the window), tokens computed
    "num_samples": "int32",  # rows that needed logits
    "num_blocks_swapped_out": "int32",
    "num_blocks_swapped_in": "int32",
    "num_blocks_copied": "int32",
    "schedule_ns": "int64",  # deciding the step
    "prepare_ns": "int64",  # host work before the device
    "swap_ns": "int64",  # moving blocks: swaps and copies
    "forward_ns": "int64",
    "sample_ns": "int64",
    "total_ns": "int64",  # from plan to commit; spans may overlap, and leave gaps
    "repeat": "int32",  # 0, 1, …: number among the steps of the same shape
}
MAX_STEP_NS = 3_600_000_000_000  # of one measured step
MAX_COUNT = 2**40  # of tokens, positions, blocks
CLOCKS_NS = 1_000_000  # by which a span (on the device's clock) may exceed its step (on the host's clock)
_NUMBERS = tuple(name for name in COLUMNS if name != "prefills")

# fields of a model on which the time of a step depends; EXPERTS_FIELDS too, which may be null or missing
MODEL_SHAPE = (
    "architecture", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "dtype",
)  # fmt: skip

_ROPE = {item.name for item in fields(RopeScaling)}


class MeasuredStep(NamedTuple):
    """One row of a profile. total_ns: from plan to commit."""

    shape: BatchShape
    spans: Spans
    total_ns: int
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class ProfileManifest:
    """What was measured. device: its name in the device library, which a simulation must choose; device_description:
    its name in the engine. model: the fields of ModelSpec. dtype: of the weights in the run. kv_dtype: None: the
    model's. sliding_window: None: none. captured_decodes, captured_tokens: largest steps with one token of each
    sequence, and largest other steps, that the engine replayed as padded graphs; 0: none, or not known. probe_ns: times
    are scaled to a machine whose probe takes this long (backend.pace=probe_scaled); None: times as measured."""

    device: str
    model: dict[str, Any]
    block_size: int
    dtype: str
    tensor_parallel_size: int = 1
    kv_dtype: str | None = None
    sliding_window: int | None = None
    captured_decodes: int = 0
    captured_tokens: int = 0
    probe_ns: int | None = None
    attention: str = ""
    device_description: str = ""
    driver: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    command: str = ""
    format: int = FORMAT

    @classmethod
    def from_json(cls, raw: Any, place: str) -> ProfileManifest:
        """Reads a manifest. Raises ProfileError with the place, the field, its value and what was expected."""
        if not isinstance(raw, dict):
            raise ProfileError(f"{place}: the manifest is {shown(raw)}; expected a JSON object")
        if raw.get("format") != FORMAT:
            raise ProfileError(f"{place}: 'format' is {shown(raw.get('format'))}; expected {FORMAT}")
        hints = get_type_hints(cls)
        for name in raw:
            if name not in hints:
                raise ProfileError(unknown(f"{place}: the manifest has an unknown field {shown(name)}", name, hints))
        raw = {"captured_decodes": 0, "captured_tokens": 0, "probe_ns": None, **raw}  # missing in older profiles
        for item in fields(cls):
            if item.name not in raw:
                raise ProfileError(f"{place}: the manifest lacks {item.name!r}")
            kinds = _KINDS[hints[item.name]]
            value = raw[item.name]
            if not isinstance(value, kinds):
                names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
                raise ProfileError(f"{place}: {item.name!r} is {shown(value)}; expected {names}")
        for name, (low, high) in _BOUNDS.items():
            if raw[name] is not None and not whole(low, high)(raw[name]):
                raise ProfileError(f"{place}: {name!r} is {shown(raw[name])}; expected from {low} to {high:,}")
        for name, choices in (("dtype", [*DTYPE_BYTES]), ("kv_dtype", [None, *KV_DTYPE_BYTES])):
            if raw[name] not in choices:
                names = ", ".join(map(_text, choices))
                raise ProfileError(f"{place}: {name!r} is {shown(raw[name])}; expected one of {names}")
        _checked_model(raw["model"], place)
        return cls(**{item.name: raw[item.name] for item in fields(cls)})

    @property
    def max_length(self) -> int:
        """Positions of the model's longest sequence; MAX_SIZE if the manifest does not give it."""
        return _checked_model(self.model, "").max_length if "max_position_embeddings" in self.model else MAX_SIZE

    def check_matches(
        self,
        place: str,
        *,
        model: ModelSpec,
        device: str,
        block_size: int,
        tensor_parallel_size: int,
        kv_dtype: str | None,
        sliding_window: int | None,
    ) -> None:
        """Raises ConfigError, in one line with both values, if the profile does not match the run. place: its name."""
        own, theirs = asdict(model), self.model | {"dtype": self.dtype}
        for name in (*MODEL_SHAPE, *EXPERTS_FIELDS):
            if theirs.get(name) != own[name]:
                cure = "choose the model that was profiled"
                if name == "dtype" and "fp8" not in (self.dtype, model.dtype):  # maybe an engine's, not the files'
                    said = f'give a copy of config.json with "dtype": "{self.dtype}"'
                    cure = said if model.path else f"set model.dtype={self.dtype}"
                raise ConfigError(
                    f"{place} is of model {self.model['name']!r} ({name} {_text(theirs.get(name))}), and the run's is "
                    f"{model.name!r} ({name} {_text(own[name])}); {cure}, or measure this one with `testbed calibrate`"
                )
        run = {
            "device": device, "block_size": block_size, "tensor_parallel_size": tensor_parallel_size,
            "kv_dtype": kv_dtype or model.dtype, "sliding_window": sliding_window,
        }  # fmt: skip
        profiled = {name: getattr(self, name) for name in run} | {"kv_dtype": self.kv_dtype or self.dtype}
        keys = {"device": "device", "tensor_parallel_size": "device.tensor_parallel_size"}
        for name, value in run.items():
            if profiled[name] != value:
                key = keys.get(name, f"cache.{name}")
                raise ConfigError(
                    f"{place} was measured with {name} {_text(profiled[name])}, and the run has {_text(value)}; "
                    f"set {key}={_text(profiled[name])}, or measure this with `testbed calibrate`"
                )


_BOUNDS = {
    "block_size": (1, MAX_SIZE), "tensor_parallel_size": (1, MAX_SIZE), "sliding_window": (1, MAX_SIZE),
    "probe_ns": (1, MAX_PART_NS), "captured_decodes": (0, MAX_SIZE), "captured_tokens": (0, MAX_SIZE),
}  # fmt: skip
_KINDS: dict[Any, tuple[type, ...]] = {
    str: (str,), int: (int,), str | None: (str, type(None)), int | None: (int, type(None)),
    dict[str, Any]: (dict,), dict[str, str]: (dict,),
}  # fmt: skip


def _checked_model(model: dict[str, Any], place: str) -> ModelSpec:
    """Returns the fields of a model on which step times and lengths depend, and the numbers of its norms and positions.
    Raises ProfileError for impossible ones."""
    needed = ("name", *MODEL_SHAPE)
    missing = [name for name in needed if name not in model]
    if missing:
        raise ProfileError(f"{place}: 'model' lacks {', '.join(missing)}")
    given = {name: model[name] for name in (*needed, "max_position_embeddings") if name in model}
    given |= {name: model[name] for name in EXPERTS_FIELDS if model.get(name) is not None}
    hints, rope = get_type_hints(ModelSpec), model.get("rope_scaling")
    for name, value in given.items():
        hint = int if name in EXPERTS_FIELDS else hints[name]
        if type(value) is not hint:
            raise ProfileError(f"{place}: model.{name} is {shown(value)}; expected {hint.__name__}")
    if rope is not None and not (isinstance(rope, dict) and {"rope_type"} <= rope.keys() <= _ROPE):
        raise ProfileError(
            f"{place}: model.rope_scaling is {shown(rope)}; expected null, or {', '.join(sorted(_ROPE))}"
        )
    given |= {name: model[name] for name in ("rms_norm_eps", "rope_theta") if name in model}
    try:
        return ModelSpec(**given, rope_scaling=None if rope is None else RopeScaling(**rope))
    except ConfigError as error:
        raise ProfileError(f"{place}: {error}") from None


def _text(value: object) -> str:
    return "null" if value is None else str(value)


class Profile(NamedTuple):
    manifest: ProfileManifest
    steps: list[MeasuredStep]


def number_repeats(steps: Iterable[tuple[BatchShape, Spans, int]]) -> list[MeasuredStep]:
    """Returns measured steps (shape, spans, total_ns), in order, with the repeats of each shape numbered."""
    seen: Counter[BatchShape] = Counter()
    numbered = []
    for shape, spans, total_ns in steps:
        numbered.append(MeasuredStep(shape, spans, total_ns, seen[shape]))
        seen[shape] += 1
    return numbered


def write_profile(path: str | Path, manifest: ProfileManifest, steps: Iterable[MeasuredStep]) -> None:
    """Writes the file, whole or not at all."""
    import pyarrow as pa  # not at the top: the core runs without it
    import pyarrow.parquet as pq

    struct = pa.struct([("start", pa.int64()), ("num_tokens", pa.int64())])
    kinds = {_PREFILLS: pa.list_(struct)}
    document = json.dumps(asdict(manifest))
    schema = pa.schema(
        [(name, kinds.get(kind) or pa.type_for_alias(kind)) for name, kind in COLUMNS.items()],
        metadata={METADATA_KEY: document},
    )
    rows = [_as_row(step) for step in steps]
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as part:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), part, compression="zstd")


def _as_row(step: MeasuredStep) -> dict[str, Any]:
    shape = step.shape.as_dict() | {"prefills": [chunk.as_dict() for chunk in step.shape.prefills]}
    return {**shape, **step.spans.as_dict(), "total_ns": step.total_ns, "repeat": step.repeat}


def read_profile(path: str | Path) -> Profile:
    """Reads a profile. Raises ProfileError with the file, the row, the field, its value and what was expected."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = Path(path)
    if not file.is_file():
        raise ProfileError(f"no profile at {path}; `testbed calibrate` makes one (docs/calibration.md)")
    if file.suffix == ".json":
        raise ProfileError(f"{path} is no profile, which is a .parquet; if it is a fit, give it as cost.path={path}")
    try:
        table = pq.ParquetFile(file).read()
    except (pa.ArrowException, OSError) as error:
        said = f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}"
        raise ProfileError(f"{said.rstrip('.')}; `testbed calibrate` makes one (docs/calibration.md)") from None
    document = (table.schema.metadata or {}).get(METADATA_KEY.encode())
    if document is None:
        raise ProfileError(f"{path} is no profile: its metadata lacks {METADATA_KEY!r}; docs/calibration.md says more")
    place = f"{path}: {METADATA_KEY}"
    manifest = ProfileManifest.from_json(json_object(document, place, ProfileError), place)
    for name in table.column_names:
        if name not in COLUMNS:
            raise ProfileError(unknown(f"{path} has an unknown column {shown(name)}", name, COLUMNS))
    if _REPEATED not in table.column_names:  # an older profile: none were counted
        table = table.append_column(_REPEATED, pa.array([0] * table.num_rows, pa.int64()))
    for name, kind in COLUMNS.items():
        if name not in table.column_names:
            raise ProfileError(f"{path} lacks the column {name!r} ({kind}); it has {', '.join(table.column_names)}")
        is_right = pa.types.is_list if kind == _PREFILLS else pa.types.is_integer
        if not is_right(table.schema.field(name).type):
            raise ProfileError(f"{path}: column {name!r} is of type {table.schema.field(name).type}; expected {kind}")
    if not table.num_rows:
        raise ProfileError(f"{path} has no rows")
    rows, max_length = table.select(list(COLUMNS)).to_pylist(), manifest.max_length
    return Profile(manifest, [_step(row, f"{path}, row {number}", max_length) for number, row in enumerate(rows)])


def _step(row: dict[str, Any], place: str, max_length: int) -> MeasuredStep:
    """Returns one row as a MeasuredStep. Raises ProfileError. max_length: of a sequence."""

    def must(holds: bool, otherwise: str) -> None:
        if not holds:
            raise ProfileError(f"{place}: {otherwise}")

    for name in _NUMBERS:
        _expect(place, name, row[name], least=1 if name == "total_ns" else 0)
        is_short = not name.endswith("_ns") or row[name] <= MAX_STEP_NS
        must(is_short, f"{name} is {row[name]}; expected at most {MAX_STEP_NS:,}, an hour")
    total_ns = row["total_ns"]
    for name in Spans.FIELDS:
        is_part = row[name] <= total_ns + CLOCKS_NS
        must(is_part, f"{name} is {row[name]}, and total_ns {total_ns}; expected no part longer than its step")
    must(row["prefills"] is not None, "prefills is null; expected a list, which may be empty")
    chunks = [_chunk(chunk, place, f"prefills[{i}]", max_length) for i, chunk in enumerate(row["prefills"])]
    num, context, longest = row["num_decodes"], row["decode_context_tokens"], row["longest_decode_context"]
    given = f"decode_context_tokens is {context} with {num} decodes"
    must(context >= num if num else not context, f"{given}; expected at least one for each, and 0 without any")
    is_within = context <= num * max_length
    must(is_within, f"{given}; expected at most the model's length for each, {max_length:,}")
    must(
        not longest or 0 < context <= num * longest <= num * context,
        f"longest_decode_context is {longest} of {num} decodes that attend to {context} positions in all; expected "
        "from their mean to all of them, or 0 where it is not known",
    )
    must(
        row[_REPEATED] <= context - longest,
        f"{_REPEATED} is {row[_REPEATED]} of {context} positions, of which the longest decode has {longest}; expected "
        f"at most {context - longest}",
    )
    most, num_samples = num + len(chunks), row["num_samples"]
    must(num_samples <= most, f"num_samples is {num_samples}; expected at most a row each, {most}")
    shape = BatchShape(**{**{name: row[name] for name in BatchShape.FIELDS}, "prefills": tuple(chunks)})
    must(not shape.is_empty, "the step computed and moved nothing; expected decodes, prefills or blocks")
    return MeasuredStep(shape, Spans(*(row[name] for name in Spans.FIELDS)), total_ns, row["repeat"])


def _chunk(chunk: Any, place: str, where: str, max_length: int) -> PrefillChunk:
    if not isinstance(chunk, dict) or not {"start", "num_tokens"} <= chunk.keys():
        raise ProfileError(f"{place}: {where} is {shown(chunk)}; expected start and num_tokens")
    _expect(place, f"{where}.start", chunk["start"], least=0)
    _expect(place, f"{where}.num_tokens", chunk["num_tokens"], least=1)
    if chunk["start"] + chunk["num_tokens"] > max_length:
        raise ProfileError(f"{place}: {where} is {chunk}; expected to end within the model's length, {max_length:,}")
    return PrefillChunk(chunk["start"], chunk["num_tokens"])


def _expect(place: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ProfileError(f"{place}: {name} is {_text(value)}; expected a whole number, at least {least}")
    if not name.endswith("_ns") and value > MAX_COUNT:
        raise ProfileError(f"{place}: {name} is {value}; expected at most {MAX_COUNT:,}")
