"""Tables of the PyPI package aiconfigurator-core: kernels of vLLM, SGLang and TensorRT-LLM, measured by NVIDIA.

Reads `systems/data/<gpu>/{gemm,attention,comm}/<engine>/<version>/*.parquet` as whole columns. The meaning of the
columns follows from how the package's code and its collectors use them (docs/tables.md): latencies are ms of one call;
`step` of a decode is the number of positions before its own token; message sizes are numbers of elements, for an
all-gather those of the gathered whole; a `window_size` of 0 means no window.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from experiments.tables.columns import latencies_ns, reason, rows_of
from testbed.arrow import as_arrow, constant
from testbed.errors import ConfigError, ProfileError
from testbed.foreign_text import unknown
from testbed.specs.operator_tables import OperatorTables, check_rows, where

PACKAGE = "aiconfigurator_core"
Kept = tuple[tuple[str, ...], int]  # dtypes of GEMMs, head size
ENGINES = ("vllm", "sglang", "trtllm")
LICENCE = "Apache-2.0"
_ELSE = "import tables of your own (testbed tables import), or choose cost=roofline"
_DTYPE_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "float": 4, "float32": 4}
_GEMM = ("kernel_source", "gemm_dtype", "m", "n", "k", "latency")
_ATTENTION = (
    "kernel_source", "batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "beam_width", "attn_dtype",
    "kv_cache_dtype", "step", "latency",
)  # fmt: skip
_REDUCE = ("kernel_source", "allreduce_dtype", "num_gpus", "message_size", "latency")
_NCCL = ("kernel_source", "op_name", "nccl_dtype", "num_gpus", "message_size", "latency")


@dataclass(frozen=True, slots=True)
class Coverage:
    """The tables that the package has of one device and engine."""

    device: str  # name in our device library, or the package's name if the library lacks it
    engine: str
    version: str
    operators: tuple[str, ...]
    num_points: int


def load(
    device: str, engine: str = "vllm", version: str | None = None, *, systems: Path | None = None,
    kept: Kept | None = None, option: str = "--",
) -> OperatorTables:  # fmt: skip
    """The tables of a device (our name or theirs) and an engine. version: None is the newest complete one.

    systems: the package's folder `systems`; None finds the installed package. kept: read only GEMMs of these dtypes and
    attention of this head size, and add no standing doubts. option: what the user writes before `engine` and `version`,
    for messages. Raises ConfigError, ProfileError.
    """
    root = systems_folder(systems)
    system = _system(root, device)
    folder = root / "data" / system
    if engine not in ENGINES:
        raise ConfigError(unknown(f"{option}engine is {engine!r}", engine, ENGINES))
    chosen = _version(folder, engine, version, option)
    source = f"aiconfigurator-core {_package_version(root)}"
    label = partial(rows_of, source=source, licence=LICENCE)
    own = partial(label, engine=f"{engine} {chosen}")
    files = _files(folder, engine, chosen)
    tables = [_gemm(files["gemm"], own, kept)]
    tables += [_attention(files[name], name, own, kept) for name in ("attention_prefill", "attention_decode")]
    doubts = []
    if (reduce := files.get("all_reduce")) is not None:
        if reduce.parent.name != chosen:
            doubts.append(
                f"{engine} {chosen} has no all-reduce of its own there: that of {reduce.parent.name} is taken"
            )
        tables.append(_all_reduce(reduce, partial(label, engine=f"{engine} {reduce.parent.name}")))
    if (nccl := files.get("nccl")) is not None:
        tables += _nccl(nccl, partial(label, engine=f"nccl {nccl.parent.name}"))
    rows = pa.concat_tables(tables).combine_chunks()
    check_rows(rows, f"{source}, {system}")
    if kept is None:
        doubts += _standing_doubts(rows)
    return OperatorTables(_our_name(system), _description(files["gemm"]), rows, tuple(doubts))


def coverage() -> list[Coverage]:
    """The tables of the installed package, one entry for each device and engine; counted without reading them."""
    root, found = systems_folder(), []
    for system in _systems(root):
        for engine in ENGINES:
            folder = root / "data" / system
            versions = _whole_versions(folder, engine)
            if not versions:
                continue
            chosen = versions[-1]
            counted = _counted(_files(folder, engine, chosen))
            found.append(Coverage(_our_name(system), engine, chosen, tuple(counted), sum(counted.values())))
    return found


def _files(folder: Path, engine: str, version: str) -> dict[str, Path]:
    """The files of a version, by operator; collectives of which the device has no file are left out."""
    attention = folder / "attention" / engine / version
    reduce = _nearest(folder / "comm" / engine, "custom_allreduce_perf.parquet", version)
    nccl = _nearest(folder / "comm" / "nccl", "nccl_perf.parquet", None)
    return {
        "gemm": folder / "gemm" / engine / version / "gemm_perf.parquet",
        "attention_prefill": attention / "context_attention_perf.parquet",
        "attention_decode": attention / "generation_attention_perf.parquet",
    } | {name: file for name, file in (("all_reduce", reduce), ("nccl", nccl)) if file is not None}


def _counted(files: dict[str, Path]) -> dict[str, int]:
    counts = {name: pq.read_metadata(file).num_rows for name, file in files.items() if file.is_file()}
    if counts.pop("nccl", 0):  # it has several operators
        kinds = pq.ParquetFile(files["nccl"]).read(["op_name"])["op_name"].to_pylist()
        for name in ("all_reduce", "all_gather"):
            counts[name] = counts.get(name, 0) + kinds.count(name)
    return counts


def systems_folder(given: Path | None = None) -> Path:
    """The package's folder `systems`. Raises ConfigError if there is none."""
    if given is not None:
        for folder in (given, given / "systems", given / PACKAGE / "systems"):
            if (folder / "data").is_dir():
                return folder
        raise ConfigError(f"{given} is no `systems` folder of {PACKAGE}: it has no folder `data`")
    spec = find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    if not places:
        raise ConfigError(
            f"the package {PACKAGE} is not installed; install the extra: pip install '.[tables]' in the repository"
        )
    return systems_folder(Path(places[0]))


def _package_version(systems: Path) -> str:
    """The package's version, from the dist-info folder next to it."""
    named = sorted(systems.parent.parent.glob(f"{PACKAGE}-*.dist-info"))
    return named[-1].name.split("-")[1].removesuffix(".dist") if named else "of unknown version"


def _our_name(system: str) -> str:
    """The name in our device library, which leaves the form of the card out."""
    return system.removesuffix("_sxm")


def _systems(root: Path) -> list[str]:
    return sorted(folder.name for folder in (root / "data").iterdir() if folder.is_dir())


def _system(root: Path, device: str) -> str:
    """Their name of a device, from our name or theirs. Raises ConfigError if there are no tables of it."""
    with_data = [system for system in _systems(root) if any((root / "data" / system / "gemm").glob("*/*/*.parquet"))]
    named = next((system for system in with_data if device in (system, _our_name(system))), None)
    if named is None:
        names = [_our_name(system) for system in with_data]
        problem = unknown(f"aiconfigurator-core has no tables of the device {device!r}", device, names)
        raise ConfigError(f"{problem}; {_ELSE}")
    return named


def _version_key(version: str) -> tuple[tuple[int, int], ...]:
    """A sort key for versions: 0.9.0, 0.24.0, 1.3.0rc5, 1.3.0rc20, 1.3.0, 1.3.0.post1."""
    parts = [*re.findall(r"\d+|[a-z]+", version), ""]  # "" is where a release ends
    return tuple((0, int(part)) if part.isdigit() else ({"post": 1, "": 0}.get(part, -1), 0) for part in parts)


def _versions(folder: Path, file: str) -> list[str]:
    """The versions that have the file, the newest last."""
    return sorted((found.parent.name for found in folder.glob(f"*/{file}")), key=_version_key)


def _whole_versions(folder: Path, engine: str) -> list[str]:
    """The versions that have GEMMs and attention, the newest last."""
    versions = _versions(folder / "gemm" / engine, "gemm_perf.parquet")
    return [name for name in versions if (folder / "attention" / engine / name).is_dir()]


def _version(folder: Path, engine: str, wanted: str | None, option: str) -> str:
    """The wanted version, or the newest one, of the complete versions. Raises ConfigError if there is none."""
    whole = _whole_versions(folder, engine)
    if not whole:
        raise ConfigError(f"aiconfigurator-core has no tables of {engine} on {folder.name}; {_ELSE}")
    if wanted is None:
        return whole[-1]
    if wanted not in whole:
        raise ConfigError(unknown(f"{option}version is {wanted!r}", wanted, whole))
    return wanted


def _nearest(folder: Path, file: str, version: str | None) -> Path | None:
    """The file of this version, else of the newest before it, else of the oldest after it. version None: the newest."""
    versions = _versions(folder, file)
    if not versions:
        return None
    if version is None:
        return folder / versions[-1] / file
    before = [name for name in versions if _version_key(name) <= _version_key(version)]
    return folder / (before[-1] if before else versions[0]) / file


def _read(file: Path, columns: tuple[str, ...], *optional: str) -> Any:
    """The columns of a Parquet file, and `time_ns` from its latencies. Raises ProfileError if the file or a column is
    missing."""
    if not file.is_file():
        raise ProfileError(f"no file at {file}; the package was expected to have it")
    try:
        names = pq.read_schema(file).names
        missing = [name for name in columns if name not in names]
        if missing:
            raise ProfileError(f"{file} lacks the column {missing[0]!r}; it has {', '.join(names)}")
        table = pq.ParquetFile(file).read([*columns, *(name for name in optional if name in names)])
    except (pa.ArrowException, OSError) as error:
        raise ProfileError(f"{file} cannot be read as Parquet: {reason(error)}") from None
    for index, name in enumerate(table.column_names):
        is_text = name.endswith("_dtype") or name in ("kernel_source", "op_name")
        wanted = pa.string() if is_text else pa.float64() if name == "latency" else pa.int64()
        try:
            table = table.set_column(index, name, table[name].cast(wanted))
        except pa.ArrowException:
            raise ProfileError(
                f"{file}: the column {name!r} is of {table[name].type}; expected {wanted}: install the package anew"
            ) from None
    return table.append_column("time_ns", latencies_ns(table["latency"], str(file)))


def _description(file: Path) -> str:
    """The source's name for the device."""
    names = pq.read_schema(file).names
    return str(pq.ParquetFile(file).read(["device"])["device"][0]) if "device" in names else ""


def _dtypes(column: Any) -> Any:
    """The dtypes by our names: only `half` differs. Those without such a name stay: fp8_block, int8_wo, nvfp4, ..."""
    return pc.replace_substring_regex(column, "^half$", "float16")


def _gemm(file: Path, label: Any, kept: Kept | None) -> Any:
    table = _read(file, _GEMM)
    if kept is not None:
        table = table.filter(pc.is_in(table["gemm_dtype"], value_set=as_arrow(kept[0], pa.string())))
    return label(
        table.num_rows, operator="gemm", kernel=table["kernel_source"], dtype=_dtypes(table["gemm_dtype"]),
        m=table["m"], n=table["n"], k=table["k"], time_ns=table["time_ns"],
    )  # fmt: skip


def _attention(file: Path, operator: str, label: Any, kept: Kept | None) -> Any:
    equal = {"beam_width": 1} if kept is None else {"beam_width": 1, "head_dim": kept[1]}
    table = where(_read(file, _ATTENTION, "window_size"), **equal)
    windows, heads, kv_heads, zero = None, table["num_heads"], table["num_key_value_heads"], constant(0, pa.int64())
    if "window_size" in table.column_names:
        size = table["window_size"]
        windows = pc.if_else(pc.greater(size, zero), size, constant(None, pa.int64()))
    sizes = {"new_tokens": table["isl"], "context": table["step"]}
    if operator == "attention_decode":
        sizes = {"context": pc.add(table["isl"], table["step"])}
    return label(
        table.num_rows, operator=operator, kernel=table["kernel_source"], dtype=_dtypes(table["attn_dtype"]),
        kv_dtype=_dtypes(table["kv_cache_dtype"]), num_heads=heads, head_dim=table["head_dim"],
        num_kv_heads=pc.if_else(pc.equal(kv_heads, zero), heads, kv_heads),  # 0: as many as heads
        window=windows, batch=table["batch_size"], time_ns=table["time_ns"], **sizes,
    )  # fmt: skip


def _num_bytes(sizes: Any, dtypes: Any, file: Path) -> Any:
    """The bytes of messages whose sizes are numbers of elements."""
    names = dtypes.to_pylist()
    for name in dict.fromkeys(names):
        if name not in _DTYPE_BYTES:
            raise ProfileError(unknown(f"{file}: messages of dtype {name!r}", name, list(_DTYPE_BYTES)))
    return pc.multiply(sizes, as_arrow([_DTYPE_BYTES[name] for name in names], pa.int64()))


def _all_reduce(file: Path, label: Any) -> Any:
    table = _read(file, _REDUCE)
    several = table.filter(pc.greater(table["num_gpus"], constant(1, pa.int64())))
    return _collective(several, "all_reduce", "allreduce_dtype", file, label)


def _nccl(file: Path, label: Any) -> list[Any]:
    """The all-reduces and all-gathers; the schema has no other collectives."""
    table = _read(file, _NCCL)
    return [
        _collective(where(table, op_name=operator), operator, "nccl_dtype", file, label)
        for operator in ("all_reduce", "all_gather")
    ]


def _collective(table: Any, operator: str, dtype: str, file: Path, label: Any) -> Any:
    """The rows of one kind of collective. dtype: name of the dtype column."""
    return label(
        table.num_rows, operator=operator, kernel=table["kernel_source"], dtype=_dtypes(table[dtype]),
        num_bytes=_num_bytes(table["message_size"], table[dtype], file), num_ranks=table["num_gpus"],
        time_ns=table["time_ns"],
    )  # fmt: skip


def _standing_doubts(rows: Any) -> list[str]:
    """Doubts about what these tables always lack, with the numbers found in them."""
    prefill = where(rows, operator="attention_prefill")
    doubts = []
    if prefill.num_rows and pc.max(prefill["context"]).as_py() == 0:
        doubts.append(
            f"attention_prefill: all {prefill.num_rows:,} points are whole prompts; "
            "chunks behind a context were not measured"
        )
    decode = where(rows, operator="attention_decode")
    own_heads = decode.filter(pc.equal(decode["num_heads"], decode["num_kv_heads"]))
    if own_heads.num_rows:
        most = pc.max(own_heads["num_heads"]).as_py()
        doubts.append(f"attention_decode: with as many KV heads as heads (no GQA) up to {most} heads a rank only")
    eager = rows.filter(pc.and_(pc.equal(rows["operator"], "all_reduce"), pc.ends_with(rows["kernel"], "_eager")))
    if eager.num_rows:
        least_us = pc.min(eager["time_ns"]).as_py() / 1e3
        doubts.append(f"all_reduce: eager calls are timed with the host's launches, never below {least_us:.3g} us")
    doubts.append("no embedding, norms, rotary, activation, sampler or host time: kernels of these tables only")
    return doubts
