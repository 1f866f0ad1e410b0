"""Tables of LLMServingSim's profiler: layers of vLLM, run one at a time by vLLM's own engine.

Reads a folder with `meta.yaml` and `tp<n>/{dense,per_sequence,attention}.csv`, or a folder above several of these. The
CSVs name layers without shapes; the shapes come from the model that meta.yaml names. The profiler ran one rank's part
of the model on one device, so there are no collectives. `kv_prefill` and `kv_decode` count positions computed before;
`time_us` is of one layer. `skew_fit.csv` is a correction of their simulator for batches of unequal contexts. It is
fitted, not measured, and therefore not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from experiments.configuration.names import device_named, model_named
from experiments.tables.columns import reason, rows_of
from experiments.tables.csv_table import CsvTable
from experiments.tables.devices import entry, layer_shapes, model_spec
from testbed.errors import ProfileError
from testbed.foreign_text import parsed, shown, whole
from testbed.specs.model import DTYPE_BYTES, ModelSpec, check_ranks
from testbed.specs.operator_tables import OperatorTables

LICENCE = "MIT"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", **{name: name for name in DTYPE_BYTES}}
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_ALONE = "no collectives and no host time: each rank's part ran alone on one device"
_SKEW = "all decodes of a call have one context; skew_fit.csv, fitted to unequal ones, is not imported"
Rows = Callable[..., Any]


def read(folder: Path, device: str | None = None, model: str | None = None) -> OperatorTables:
    """Reads the tables below a folder. device, model: names in our library, which take precedence over the names in
    meta.yaml. Raises ConfigError, ProfileError."""
    folder = folder.absolute()  # "." has no name
    metas = sorted(folder.rglob("meta.yaml")) or sorted(folder.parent.glob("meta.yaml"))
    if not metas:
        raise ProfileError(
            f"{folder} holds no meta.yaml; expected <gpu>/<org>/<model>/<dtype>/, with meta.yaml and tp<n>/dense.csv"
        )
    tables, notes, described, others = [], dict[str, list[str]](), dict[str, str](), dict[str, None]()
    for file in metas:
        meta = _meta(file)
        gpu = str(meta.get("gpu", meta["hardware"]))
        known = device_named(gpu, meta["hardware"])  # hardware: their folder's name, less specific
        described[entry("device", device, known, meta["hardware"])] = gpu
        if device is not None and known not in (None, device):
            others[f"meta.yaml says {shown(gpu)}, and --device is {device}: are these tables of that device?"] = None
        if len(described) > 1:
            raise ProfileError(f"{folder} holds tables of several devices ({', '.join(described)}); give one's folder")
        spec = model_spec(entry("model", model, model_named(meta["model"]), meta["model"]))
        folders = [folder] if folder.parent == file.parent else sorted(file.parent.glob("tp*"))
        for ranks in folders:
            is_copy = ranks.name != "tp1" and any(other.name == "tp1" for other in folders)
            tables += _of_ranks(ranks, meta, spec, without=_STABLE if is_copy else ())
            if (ranks / "skew_fit.csv").is_file():
                notes.setdefault(_SKEW, []).append(f"{spec.name} {ranks.name}")
        engine = "an eager engine" if _engine(meta).get("enforce_eager") else "an engine"
        often = f"each time is the mean of {meta.get('measurement_iterations', 'some')} runs of {engine}"
        notes.setdefault(often, []).append(spec.name)
    if not tables:
        raise ProfileError(f"{folder} holds no tp<n>/dense.csv; see docs/tables.md")
    [(name, gpu)] = described.items()
    doubts = (f"{', '.join(of)}: {note}" for note, of in notes.items())
    return OperatorTables(name, gpu, pa.concat_tables(tables).combine_chunks(), (*others, _ALONE, *doubts))


def _engine(meta: dict[str, Any]) -> dict[str, Any]:
    """The configuration of vLLM in meta.yaml."""
    engine = meta.get("engine_effective")
    return engine if isinstance(engine, dict) else {}


def _meta(file: Path) -> dict[str, Any]:
    """The content of meta.yaml. Raises ProfileError if it lacks model, hardware, variant or vLLM's version."""
    try:
        meta = parsed(yaml.safe_load, file.read_bytes())
    except (ValueError, yaml.YAMLError) as error:
        raise ProfileError(f"{file} cannot be read as YAML: {reason(error)}") from None
    if not isinstance(meta, dict):
        raise ProfileError(f"{file}: expected fields, as model and hardware")
    for name in ("model", "hardware", "variant", "vllm_version"):
        if not isinstance(meta.get(name), str):
            raise ProfileError(f"{file}: {name!r} is {shown(meta.get(name))}; expected a string")
    if meta["variant"] not in _DTYPES:
        raise ProfileError(f"{file}: 'variant' is {shown(meta['variant'])}; expected one of {', '.join(_DTYPES)}")
    return meta


def _of_ranks(folder: Path, meta: dict[str, Any], spec: ModelSpec, without: tuple[str, ...]) -> list[Any]:
    """The tables of one degree of tensor parallelism, `tp<n>`. without: layers that are left out."""
    text = folder.name.removeprefix("tp")
    size = int(text) if text.isdigit() else 0
    if not whole(1, 1024)(size):
        raise ProfileError(f"{folder}: expected a folder named tp<n>, n ranks")
    check_ranks(spec, size)
    _check_shape(folder, meta, spec)
    version, dtype = str(meta.get("profiler_version", "of unknown version")), _DTYPES[meta["variant"]]
    label = partial(
        rows_of, dtype=dtype, engine=f"vllm {meta['vllm_version']}", source=f"llmservingsim {version}", licence=LICENCE
    )
    widths = layer_shapes(spec, size)
    tables = [_layers(folder / name, column, widths, label, without) for name, column in _LAYER_FILES]
    return [*tables, *_attention(folder / "attention.csv", spec, size, partial(label, kv_dtype=dtype))]


_LAYER_FILES = (("dense.csv", "tokens"), ("per_sequence.csv", "sequences"))
_STABLE = ("layernorm", "final_layernorm", "qk_norm", "sampler")  # the profiler copies these from tp1 to every tp<n>


def _check_shape(folder: Path, meta: dict[str, Any], spec: ModelSpec) -> None:
    """Raises ProfileError if a profiled size does not divide the model's."""
    ran = _engine(meta).get("hf_overrides")
    if not isinstance(ran, dict):
        return
    for name in ("intermediate_size", "num_attention_heads"):
        has, value = getattr(spec, name), ran.get(name)
        if isinstance(value, int) and value > 0 and has % value:
            raise ProfileError(
                f"{folder.parent / 'meta.yaml'}: {name} was {value}, which is no share of {has}, that of {spec.name}; "
                "say which model it was with --model"
            )


def _layers(
    file: Path, column: str, widths: dict[str, tuple[str, int, int | None]], label: Rows, without: tuple[str, ...]
) -> Any:
    """The table of single layers. column: the one with the number of rows that a layer computes."""
    csv = CsvTable(file, ("layer", column, "time_us"))
    names = csv.texts("layer")
    csv.refuse_where(~np.isin(names, list(widths)), "layer", f"one of {', '.join(widths)}")
    found, index = np.unique(names, return_inverse=True)
    operators = pa.array([widths[name][0] for name in found]).take(pa.array(index))
    inner = pa.array([widths[name][2] for name in found], pa.int64()).take(pa.array(index))
    rows = label(
        csv.num_rows, operator=operators, kernel=pa.array(names), m=csv.counts(column),
        n=np.array([widths[name][1] for name in found])[index], k=inner, time_ns=csv.times("time_us", "us"),
    )  # fmt: skip
    return rows.filter(pa.array(~np.isin(names, without)))


def _attention(file: Path, spec: ModelSpec, size: int, label: Rows) -> list[Any]:
    """The tables of decodes only, of a chunk only, and of both in one call. A decode also attends to its own token."""
    csv = CsvTable(file, (*_ATTENTION, "time_us"))
    chunk, before, decodes, context = (csv.counts(name, 0) for name in _ATTENTION)
    csv.refuse_where((chunk == 0) & (decodes == 0), "prefill_chunk", "a chunk or decodes")
    time_ns = csv.times("time_us", "us")
    shared: dict[str, Any] = {
        "kernel": "attention", "num_heads": spec.num_attention_heads // size,
        "num_kv_heads": spec.num_kv_heads_per_rank(size), "head_dim": spec.head_dim, "window": spec.sliding_window,
    }  # fmt: skip
    of_a_chunk, of_decodes = {"new_tokens": chunk, "context": before}, {"batch": decodes, "time_ns": time_ns}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "attention_decode": (chunk == 0, of_decodes | {"context": context + 1}),
        "attention_prefill": (decodes == 0, of_a_chunk | {"batch": np.ones_like(chunk), "time_ns": time_ns}),
        "attention_mixed": ((chunk > 0) & (decodes > 0), of_decodes | of_a_chunk | {"decode_context": context + 1}),
    }
    return [
        label(int(some.sum()), operator=name, **shared, **{key: column[some] for key, column in columns.items()})
        for name, (some, columns) in kinds.items()
    ]
