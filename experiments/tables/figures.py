"""One figure for each operator: measured points along a few lines of its table, and the data sheet's least time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from analysis.plots import style
from experiments.tables.devices import layer_shapes, model_spec
from experiments.tables.roofline import bounds_ns, has_bound
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec
from testbed.specs.operator_tables import OperatorTables

_MAX_LINES = 6
_MARKER, _SMALL_MARKER, _MANY = 3.4, 2.2, 80  # with more than 80 points, a line has small markers
_AXES = {  # operator: the size that grows along a line, its label, the sizes that distinguish lines
    "gemm": ("m", "rows m", ("n", "k")),
    "attention_prefill": ("new_tokens", "new tokens of each prompt or chunk", ("batch", "context")),
    "attention_decode": ("context", "context of each decode (tokens)", ("batch",)),
    "attention_mixed": ("decode_context", "context of each decode (tokens)", ("batch", "new_tokens", "context")),
    "all_reduce": ("num_bytes", "message (bytes)", ("kernel", "num_ranks")),
    "all_gather": ("num_bytes", "gathered message (bytes)", ("kernel", "num_ranks")),
    "elementwise": ("m", "rows m", ("kernel", "n")),
    "sampler": ("m", "rows m", ("n",)),
}
_SHORT = {"num_ranks": "ranks", "new_tokens": "new"}
_HEADS = ("num_heads", "num_kv_heads", "head_dim")


def draw(
    tables: OperatorTables, operators: Iterable[str], model: str, sheet: DeviceSpec | None, stem: Path
) -> Iterator[Path]:
    """Writes `<stem>-<operator>.png` and `.svg` for each operator with sizes. model: the one whose shapes are drawn.
    sheet: the device's data sheet, if anybody has it."""
    spec = model_spec(model)
    for operator in operators:
        if operator in _AXES:
            figure = operator_figure(tables, operator, spec, sheet)
            yield from style.save(figure, stem.with_name(f"{stem.name}-{operator}"))


def operator_figure(tables: OperatorTables, operator: str, model: ModelSpec, sheet: DeviceSpec | None) -> Figure:
    """Left: times over a size, as measured points and as lines at the data sheet's full rates. Right: their ratio."""
    rows, about = _of_model(tables.select(operator).to_pandas(), operator, model)
    axis, says, _ = _AXES[operator]
    lines = list(_lines(rows, operator, model))
    dtype = str(rows["dtype"].iloc[0])
    has_sheet = sheet is not None and has_bound(operator, dtype, sheet)
    labels = [label for label, _ in lines]
    with style.styled():
        figure, axes = style.grid(1, 2 if has_sheet else 1, 3.1 + style.legend_height(labels))
        handles, left = [], axes[0][0]
        for index, (_, line) in enumerate(lines):
            look, mark = style.series_style(index), style.marker(index)
            x, time_us = line[axis].to_numpy(), line["time_ns"].to_numpy() / 1e3
            size = _SMALL_MARKER if len(x) > _MANY else _MARKER
            left.plot(x, time_us, mark, color=look["color"], markersize=size)
            if has_sheet and sheet is not None:
                bound_us = bounds_ns(operator, line, sheet) / 1e3
                left.plot(x, bound_us, **look, linewidth=1.0)
                axes[0][1].plot(x, time_us / bound_us, mark, **look, markersize=size, linewidth=0.6)
            handles.append(style.line_handle(**look, marker=mark))
        left.set_ylabel("time of one call (µs)")
        if has_sheet:
            left.set_title("points: measured; lines: data sheet")
            axes[0][1].axhline(1.0, color=style.GREY, linewidth=1.0)
            axes[0][1].set_ylabel("measured time / data sheet's")
            axes[0][1].set_title("1: as fast as the data sheet's full rates")
        for panel in axes[0]:
            _log(panel, says)
        engines = ", ".join(rows["engine"].unique())
        figure.suptitle(f"{operator} on {tables.device}, {dtype}{about}; {engines}", fontsize=9)
        style.legend_below(figure, handles, labels)
    return figure


def _log(panel: Axes, says: str) -> None:
    """Sets logarithmic axes with plain numbers: sizes in powers of two (1k is 1,024), times and ratios in decades."""
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))
    panel.set_xlabel(says)
    low, high = panel.dataLim.intervaly
    style.set_log(panel.yaxis, low, high)


def _size(value: float) -> str:
    for power, letter in ((30, "G"), (20, "M"), (10, "k")):
        if value >= 2**power:
            return f"{value / 2**power:g}{letter}"
    return f"{value:g}"


def _of_model(rows: pd.DataFrame, operator: str, model: ModelSpec) -> tuple[pd.DataFrame, str]:
    """The rows of one dtype, for attention also of the heads nearest to the model's; and these heads as text."""
    names = list(rows["dtype"].value_counts().index)
    wanted = [] if operator.startswith("all_") else [model.dtype, "float16"]
    dtype = next((name for name in wanted if name in names), names[0])
    rows = rows[rows["dtype"] == dtype]
    if not operator.startswith("attention"):
        return rows, ""
    rows = rows[rows["window"].isna()] if rows["window"].isna().any() else rows
    kv_dtype = dtype if (rows["kv_dtype"] == dtype).any() else rows["kv_dtype"].iloc[0]
    rows = rows[rows["kv_dtype"] == kv_dtype] if pd.notna(kv_dtype) else rows
    heads = rows[list(_HEADS)].to_numpy(float)
    own = np.array([model.num_attention_heads, model.num_key_value_heads, model.head_dim], dtype=float)
    nearest = heads[np.abs(np.log(heads / own)).sum(axis=1).argmin()]
    rows = rows[(heads == nearest).all(axis=1)]
    return rows, f", {nearest[0]:.0f} heads, {nearest[1]:.0f} KV heads of {nearest[2]:.0f}, K and V {kv_dtype}"


def _lines(rows: pd.DataFrame, operator: str, model: ModelSpec) -> Iterator[tuple[str, pd.DataFrame]]:
    """(label, rows along the axis) of a few lines: GEMMs of the model's shapes, others spread over the table."""
    axis, _, keys = _AXES[operator]
    lines = dict(iter(rows.groupby(list(keys))))
    most = max(map(len, lines.values()))
    chosen: list[Any] = [key for key, line in lines.items() if len(line) >= most / 3]
    if operator == "gemm":
        chosen = _nearest_products(chosen, model)
    elif operator == "elementwise":
        chosen = _of_each_kernel(chosen, model)
    elif operator == "attention_mixed":  # one chunk with a growing number of decodes
        chunk = min((key[1:] for key in chosen), key=lambda chunk: (chunk[1], abs(np.log(chunk[0] / 512))))
        chosen = [key for key in chosen if key[1:] == chunk]
    if len(chosen) > _MAX_LINES:
        places = np.linspace(0, len(chosen) - 1, _MAX_LINES).round().astype(int)
        chosen = [chosen[place] for place in places]
    for key in chosen:
        named = [(_SHORT.get(name, name), value) for name, value in zip(keys, key, strict=True)]
        label = ", ".join(value if isinstance(value, str) else f"{name} {value:,}" for name, value in named)
        yield label, lines[key].sort_values(axis, kind="stable")


def _nearest_products(shapes: list[Any], model: ModelSpec) -> list[Any]:
    """For each projection of a layer the (n, k) that is nearest to its own; none is repeated."""
    own = layer_shapes(model, 1)
    found = set()
    for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        distances = [np.abs(np.log(np.array(shape) / own[name][1:])).sum() for shape in shapes]
        found.add(shapes[int(np.argmin(distances))])
    return sorted(found)


def _of_each_kernel(groups: list[Any], model: ModelSpec) -> list[Any]:
    """For each kernel the (kernel, n) with a width of the model's (the widest of these), else its widest."""
    own = [n for operator, n, _ in layer_shapes(model, 1).values() if operator == "elementwise"]
    kernels = sorted({kernel for kernel, _ in groups})
    return [
        max((g for g in groups if g[0] == kernel), key=lambda group: (group[1] in own, group[1])) for kernel in kernels
    ]
