"""Operator tables: measured times of single kernels of a GPU, for cost models to look up. Owns schema, writer, reader.

One Parquet file holds the tables of one device, of any number of engines and sources. One row is one measured point
(OPERATOR_COLUMNS), with a null for each size that its operator does not have (SIZES). The file's metadata has, under
the key `testbed.operators`, a JSON object that states what was measured and how far to trust it. docs/tables.md
documents both. Knows no source and no cost model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Final

from testbed.errors import ProfileError
from testbed.foreign_text import json_object, shown, unknown
from testbed.output import whole_file
from testbed.specs.model import ModelSpec

FORMAT: Final = 1
METADATA_KEY: Final = "testbed.operators"

OPERATOR_COLUMNS: dict[str, str] = {
    "operator": "string",  # one of OPERATORS
    "kernel": "string",  # that ran, with the source's name
    "dtype": "string",  # of weights or messages: with the testbed's name if it has one
    "kv_dtype": "string",  # of K and V; null: no attention
    "m": "int64",  # gemm [m, k] x [k, n]; elementwise and sampler: m rows of n elements
    "n": "int64",
    "k": "int64",
    "num_heads": "int64",  # of one rank, as the next
    "num_kv_heads": "int64",
    "head_dim": "int64",
    "window": "int64",  # null: attends to everything
    "batch": "int64",  # sequences of an attention call; attention_mixed: decodes next to its one chunk
    "new_tokens": "int64",  # query tokens of each prompt or chunk
    "context": "int64",  # positions before the chunk; attention_decode: attended to by each decode, its own included
    "decode_context": "int64",  # attention_mixed: attended to by each decode, its own included
    "num_bytes": "int64",  # of the message that each rank holds; all_gather: of the gathered result
    "num_ranks": "int64",
    "time_ns": "float64",  # of one call (of one layer)
    "engine": "string",  # with its version: "vllm 0.24.0"
    "source": "string",  # with its version
    "licence": "string",
}
_HEADS = ("num_heads", "num_kv_heads", "head_dim")
SIZES: dict[str, tuple[str, ...]] = {  # operator -> the sizes that its rows must have
    "gemm": ("m", "n", "k"),
    "attention_prefill": (*_HEADS, "batch", "new_tokens", "context"),
    "attention_decode": (*_HEADS, "batch", "context"),
    "attention_mixed": (*_HEADS, "batch", "new_tokens", "context", "decode_context"),
    "all_reduce": ("num_bytes", "num_ranks"),
    "all_gather": ("num_bytes", "num_ranks"),
    "elementwise": ("m", "n"),
    "sampler": ("m", "n"),
    "host": (),
}
OPERATORS: Final = tuple(SIZES)
UNITS: dict[str, str] = {
    "time_ns": "nanoseconds of one call, of one layer",
    "num_bytes": "bytes of the message that each rank holds; all_gather: of the gathered whole",
    "m, n, k": "elements",
    "batch": "sequences",
    "new_tokens, context, decode_context, window": "tokens",
}
_NAMES: Final = ("operator", "kernel", "dtype", "engine", "source", "licence")  # never null


@dataclass(frozen=True, slots=True, eq=False)
class OperatorTables:
    """The tables of one device. device: its name in the device library; device_description: its name in the source.

    rows: a pyarrow.Table of OPERATOR_COLUMNS. doubts: sentences on which parts not to trust, and why, with numbers.
    """

    device: str
    device_description: str
    rows: Any
    doubts: tuple[str, ...] = ()

    def select(self, operator: str, **equal: Any) -> Any:
        """Returns the rows of an operator whose columns have the values of `equal`, as pyarrow.Table; None is null."""
        return where(self.rows, operator=operator, **equal)


def where(rows: Any, **equal: Any) -> Any:
    """Returns the rows whose columns have these values; None is null."""
    import pyarrow.compute as pc

    from testbed.arrow import constant

    masks = []
    for name, value in equal.items():
        column = rows[name]
        masks.append(column.is_null() if value is None else pc.equal(column, constant(value, column.type)))
    return rows.filter(reduce(pc.and_, masks))


def of_engine(tables: OperatorTables, engine: str, version: str | None, place: str) -> OperatorTables:
    """Returns the tables with the rows of one engine, and those of no engine (NCCL). If no version is given and all
    rows are of one other engine, it returns these.

    Raises ProfileError if the engine is missing otherwise. place: the name of the tables in the message.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from testbed.arrow import as_arrow

    wanted = engine if version is None else f"{engine} {version}"
    names = [name for name in pc.unique(tables.rows["engine"]).to_pylist() if not name.startswith("nccl")]
    chosen = [name for name in names if name == wanted or (version is None and name.split()[0] == engine)]
    if not chosen and (len(names) > 1 or version is not None):
        raise ProfileError(unknown(f"{place} has no engine {wanted!r}", wanted, sorted(names)))
    others = [name for name in names if chosen and name not in chosen]
    keep = pc.invert(pc.is_in(tables.rows["engine"], value_set=as_arrow(others, pa.string())))
    return replace(tables, rows=tables.rows.filter(keep))


def alike(dtype: str) -> tuple[str, ...]:
    """Returns the types that take the same time: both 16-bit types, or only the type itself."""
    return ("bfloat16", "float16") if dtype in ("bfloat16", "float16") else (dtype,)


def product_dtype(model: ModelSpec) -> str:
    """Returns the dtype of a model's GEMMs outside of its layers: 8-bit weights exist only within layers."""
    return "bfloat16" if model.dtype == "fp8" else model.dtype


def write_operator_tables(path: str | Path, tables: OperatorTables, command: str, *, date: str = "") -> None:
    """Writes the file, whole or not at all. command: that made the tables; date: when, in ISO format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    document = {
        "format": FORMAT, "device": tables.device, "device_description": tables.device_description,
        "command": command, "date": date, "doubts": list(tables.doubts), "units": UNITS,
    }  # fmt: skip
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in OPERATOR_COLUMNS.items()])
    table = tables.rows.select(list(OPERATOR_COLUMNS)).cast(schema)
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as part:
        pq.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(document)}), part, compression="zstd")


def read_operator_tables(path: str | Path) -> OperatorTables:
    """Reads operator tables. Raises ProfileError with file, row, column, value and what was expected."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = Path(path)
    if not file.is_file():
        found = f"{path} is a folder, not a file" if file.is_dir() else f"no operator tables at {path}"
        raise ProfileError(f"{found}; `testbed tables import` writes one (docs/tables.md)")
    try:
        table = pq.ParquetFile(file).read()
    except (pa.ArrowException, OSError) as error:
        said = f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}"
        raise ProfileError(f"{said.rstrip('.')}; `testbed tables import` writes one (docs/tables.md)") from None
    document = _document(table.schema.metadata or {}, str(path))
    rows = _typed(table, str(path))
    check_rows(rows, str(path))
    return OperatorTables(
        document["device"], document["device_description"], rows.replace_schema_metadata(None),
        tuple(document["doubts"]),
    )  # fmt: skip


def _document(metadata: dict[bytes, bytes], path: str) -> dict[str, Any]:
    """Returns the JSON object in the file's metadata. Raises ProfileError if it is missing, incomplete or wrong."""
    text = metadata.get(METADATA_KEY.encode())
    if text is None:
        raise ProfileError(f"{path} has no operator tables: its metadata lacks {METADATA_KEY!r}; see docs/tables.md")
    place = f"{path}: {METADATA_KEY}"
    document = json_object(text, place, ProfileError)
    if document.get("format") != FORMAT:
        raise ProfileError(f"{place}: 'format' is {shown(document.get('format'))}; expected {FORMAT}")
    for name, kind in (("device", str), ("device_description", str), ("command", str), ("date", str), ("doubts", list)):
        if not isinstance(document.get(name), kind):
            raise ProfileError(f"{place}: {name!r} is {shown(document.get(name))}; expected {kind.__name__}")
    if not all(isinstance(doubt, str) for doubt in document["doubts"]):
        raise ProfileError(f"{place}: 'doubts' is {shown(document['doubts'])}; expected a list of str")
    return document


def _typed(table: Any, path: str) -> Any:
    """Returns the table with the schema's columns and types. Raises ProfileError for a missing or wrong column."""
    import pyarrow as pa

    arrays = []
    for name, kind in OPERATOR_COLUMNS.items():
        if name not in table.column_names:
            raise ProfileError(f"{path} lacks the column {name!r} ({kind}); it has {', '.join(table.column_names)}")
        has = table.schema.field(name).type
        text = pa.types.is_string(has) or pa.types.is_large_string(has)
        fits = {"string": text, "int64": pa.types.is_signed_integer(has), "float64": pa.types.is_floating(has)}[kind]
        if not fits and not pa.types.is_null(has):
            raise ProfileError(f"{path}: column {name!r} is of type {has}; expected {kind}")
        arrays.append(table[name].cast(pa.type_for_alias(kind)))
    if not table.num_rows:
        raise ProfileError(f"{path} has no rows")
    return pa.table(arrays, names=list(OPERATOR_COLUMNS))


def check_rows(rows: Any, place: str) -> None:
    """Raises ProfileError for the first impossible value in a table of OPERATOR_COLUMNS."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from testbed.arrow import as_arrow, constant

    for name in _NAMES:
        missing = pc.or_kleene(rows[name].is_null(), pc.equal(rows[name], constant("", pa.string())))
        _refuse_where(rows, missing, place, name, "a name")
    strange = pc.invert(pc.is_in(rows["operator"], value_set=as_arrow(OPERATORS, pa.string())))
    row = _first(strange)
    if row is not None:
        name = rows["operator"][row].as_py()
        raise ProfileError(unknown(f"{place}, row {row}: operator is {shown(name)}", name, OPERATORS))
    time_ns = rows["time_ns"]
    fits = pc.and_(pc.is_finite(time_ns), pc.greater(time_ns, constant(0.0, pa.float64())))
    _refuse_where(rows, pc.or_kleene(time_ns.is_null(), pc.invert(fits)), place, "time_ns", "a number of ns above 0")
    for operator in pc.unique(rows["operator"]).to_pylist():
        is_one = pc.equal(rows["operator"], constant(operator, pa.string()))
        for name in SIZES[operator]:
            least = 0 if name == "context" and operator != "attention_decode" else 1
            few = pc.or_kleene(rows[name].is_null(), pc.less(rows[name], constant(least, pa.int64())))
            _refuse_where(rows, pc.and_(is_one, few), place, name, f"at least {least}: {operator} needs it")
    _refuse_where(
        rows, pc.less(rows["window"], constant(1, pa.int64())), place, "window", "at least 1, or null for none"
    )


def _refuse_where(rows: Any, mask: Any, place: str, name: str, expected: str) -> None:
    row = _first(mask)
    if row is not None:
        value = rows[name][row].as_py()
        text = "null" if value is None else shown(value)
        raise ProfileError(f"{place}, row {row}: {name} is {text}; expected {expected}")


def _first(mask: Any) -> int | None:
    """Returns the first row that a mask selects; None without any."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from testbed.arrow import constant

    row: int = pc.index(mask, constant(True, pa.bool_())).as_py()
    return None if row < 0 else row
