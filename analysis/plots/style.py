"""The style of all figures: readable in print, in greyscale, and by the colour-blind.

Colours are Okabe and Ito's (2008); every series also has its own line style and marker. If pyplot is interactive, as in
a notebook, it creates the figures, so that the cell shows them. The global rcParams are not changed.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from textwrap import wrap
from typing import Any, cast

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.lines import Line2D
from matplotlib.rcsetup import cycler
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from analysis.load import require_path
from analysis.reading.rows import FloatArray
from testbed.errors import ConfigError
from testbed.foreign_text import shown
from testbed.output import whole_file

AxesArray = NDArray[np.object_]
OwnAxes = Axes | Sequence[Axes] | AxesArray

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, BROWN, GREY = "#E69F00", "#56B4E9", "#000000", "#8B5A2B", "#8A8A8A"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, BROWN)
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)), (0, (9, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_CYCLE = cycler(color=COLOURS)
WIDTH_IN = 7.2  # text width of a page
PHONE_IN = 3.6  # width of an upright phone, at which text is as large as on a page

_OTHER_FONTS = (  # for characters that Matplotlib's own font lacks: what systems have, the first that is installed
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei",
    "PingFang SC", "Hiragino Sans GB", "Hiragino Sans", "Microsoft YaHei", "SimHei", "Yu Gothic", "Malgun Gothic",
)  # fmt: skip

STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans", *(font for font in _OTHER_FONTS if font in get_font_names())],
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.0,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 3.2,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "figure.autolayout": False,
    "figure.constrained_layout.use": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
    "svg.fonttype": "path",
    "svg.hashsalt": "llm-serving-testbed",
    "hatch.linewidth": 0.5,
    "path.simplify": True,
}


def styled(ax: object = None) -> Any:
    """A context in which this style holds; it restores the global rcParams at its end. In axes of the caller's, `ax`,
    these hold."""
    return mpl.rc_context(cast(Any, STYLE if ax is None else {}))


@contextmanager
def of_others() -> Iterator[None]:
    """A context for other code that draws: its figures have this style and a page's width. Those of pyplot are closed
    at its end, as what is drawn next without a figure of its own would go into them."""
    from matplotlib import pyplot  # not at the top: it is slow to import

    page = {"figure.figsize": (WIDTH_IN, 3.0), "figure.constrained_layout.use": True, "axes.prop_cycle": _CYCLE}
    before = pyplot.get_fignums()
    try:
        with mpl.rc_context(cast(Any, STYLE | page)):
            yield
    finally:
        for number in pyplot.get_fignums():
            if number not in before:
                pyplot.close(number)


def grid(
    num_rows: int, num_columns: int, height_in: float, *, is_narrow: bool = False, ax: OwnAxes | None = None,
    height_ratios: Sequence[float] | None = None, **options: Any,
) -> tuple[Figure, AxesArray]:  # fmt: skip
    """A figure of a page's width with axes `[num_rows, num_columns]`. is_narrow: of a phone's width, with each column
    below the one before. ax: the caller's own, row by row, which are taken instead. Call it inside `styled()`."""
    if ax is not None:
        own = np.ravel(np.asarray(ax, dtype=object))
        if own.size != num_rows * num_columns or not all(isinstance(one, Axes) for one in own):
            panels = "1 panel" if num_rows * num_columns == 1 else f"{num_rows * num_columns} panels"
            raise ConfigError(f"ax is {shown(ax)}; this plot has {panels}, and needs as many Axes")
        return cast(Figure, own[0].get_figure()), own.reshape(num_rows, num_columns)
    size: dict[str, Any] = {"figsize": (PHONE_IN if is_narrow else WIDTH_IN, height_in), "layout": "constrained"}
    if mpl.is_interactive():
        from matplotlib import pyplot  # slow to import, but already loaded

        figure = pyplot.figure(**size)
    else:
        figure = Figure(**size)
    if not is_narrow:
        axes = figure.subplots(num_rows, num_columns, squeeze=False, height_ratios=height_ratios, **options)
        return figure, axes
    ratios = None if height_ratios is None else [*height_ratios] * num_columns
    column = figure.subplots(num_rows * num_columns, 1, squeeze=False, height_ratios=ratios, **options)
    axes = column.reshape(num_columns, num_rows).T
    if options.get("sharey") == "row":
        for first, *others in axes:
            for one in others:
                one.sharey(first)
    return figure, axes


def height(panels_in: float, num_columns: int, labels: Sequence[str], *, is_narrow: bool) -> float:
    """The height, in inches, of a figure whose axes take `panels_in` on a page, with a legend of these labels below."""
    if is_narrow:
        return 0.8 * panels_in * num_columns + legend_height(labels, PHONE_IN)
    return panels_in + legend_height(labels)


def only_axes(ax: Axes | None, height_in: float) -> Axes:
    """`ax`, or the axes of a new figure of a page's width. Call it inside `styled()`."""
    _, ((axes,),) = grid(1, 1, height_in, ax=ax)
    return cast(Axes, axes)


def series_style(index: int) -> dict[str, Any]:
    """Colour and line style of the index-th series; there are 40 combinations before they repeat."""
    turn = (index + index // len(COLOURS)) % len(LINES)
    return {"color": colour(index), "linestyle": LINES[turn]}


def point_style(index: int) -> dict[str, Any]:
    return {"color": colour(index), "marker": marker(index), "linestyle": "none"}


def cloud_style(index: int) -> dict[str, Any]:
    """The points of a series of very many: small and half transparent, and one image in a vector file."""
    look = {"markersize": 2.6, "alpha": 0.55, "markeredgewidth": 0, "rasterized": True}
    return point_style(index) | look


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def marker(index: int) -> str:
    return MARKERS[(index + index // len(MARKERS)) % len(MARKERS)]


_UNDATED = {"png": ("Software",), "svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator", "Producer")}


def save(drawn: Figure | Axes | AxesArray, stem: str | PathLike[str]) -> tuple[Path, ...]:
    """Writes the figure, given by itself or by the axes that a plot returned, to `<stem>.png` and `<stem>.svg`, or to
    the one file that ends in .pdf, .png or .svg. The files are reproducible byte for byte. Returns their paths. Raises
    ConfigError for what is neither, and for a file of another kind."""
    stem, figure = require_path("the figure's file", stem), figure_of(drawn)
    if stem.suffix[1:].lower() in {*figure.canvas.get_supported_filetypes()} - {*_UNDATED}:
        raise ConfigError(f"{stem}: figures are .pdf, .png or .svg; name one, or leave out {stem.suffix} for both")
    stem.parent.mkdir(parents=True, exist_ok=True)
    is_one = stem.suffix[1:].lower() in _UNDATED
    files = (stem,) if is_one else (stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg"))
    layout, dpi = figure.get_layout_engine(), figure.dpi
    with styled(), _boxes_said_once():
        if layout is not None:
            figure.dpi = STYLE["savefig.dpi"]
            layout.execute(figure)
            figure.dpi = dpi
        figure.set_layout_engine(None)  # with one, Matplotlib lays out and draws in full before it draws each file
        for file in files:
            kind = file.suffix[1:].lower()
            with whole_file(file) as part:
                figure.savefig(part, format=kind, metadata=dict.fromkeys(_UNDATED[kind]))
        figure.set_layout_engine(layout)
    return files


_boxes: set[str] = set()  # characters of which was said that they are drawn as boxes


@contextmanager
def _boxes_said_once() -> Iterator[None]:
    """Says in one warning, once a process, which characters no font here has. Matplotlib says it of each each time."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    lacks = [(one, re.match(r"Glyph (\d+) .*missing from font", str(one.message))) for one in caught]
    for one in (one for one, is_lack in lacks if is_lack is None):
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    if new := sorted({chr(int(found[1])) for _, found in lacks if found is not None} - _boxes):
        _boxes.update(new)
        some = "".join(new[:3]) + ("…" if len(new) > 3 else "")
        warnings.warn(f"no font here has {some}, drawn as boxes: install Noto Sans CJK or another font", stacklevel=4)


def figure_of(drawn: Figure | Axes | AxesArray) -> Figure:
    if isinstance(drawn, Figure):
        if len(drawn.get_children()) == 1:  # its background
            raise ConfigError("a plot draws something, and the Figure of this one is empty")
        return drawn
    axes = np.ravel(np.asarray(drawn, dtype=object))
    if not axes.size or not all(isinstance(one, Axes) for one in axes):
        raise ConfigError(f"a plot returns its Axes, an array of them or its Figure, and this one {shown(drawn)}")
    figures = {id(one): one for one in (one.get_figure(root=True) for one in axes)}
    if len(figures) > 1:
        raise ConfigError(f"a plot is one figure, and this one returns Axes of {len(figures)}; make a plot of each")
    return cast(Figure, axes[0].get_figure(root=True))


def legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Adds one legend below all axes, where it covers no data, with as many columns as fit; long labels are folded."""
    if labels:
        labels, num_columns = _fitted(labels, figure.get_figwidth())
        figure.legend(handles, labels, loc="outside lower center", ncols=num_columns)


def legend_under(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Adds the legend of one axes below its label, where it covers no data; the figure may have other axes."""
    if labels:
        below = axes.transAxes + ScaledTranslation(0, -0.46, figure_of(axes).dpi_scale_trans)
        width_in = axes.get_position().width * figure_of(axes).get_figwidth()
        place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "bbox_transform": below}
        labels, num_columns = _fitted(labels, width_in)
        axes.legend(handles, labels, ncols=num_columns, borderaxespad=0.0, **place)


def legend_height(labels: Sequence[str], width_in: float = WIDTH_IN) -> float:
    """The height of `legend_below`, in inches; with 0.77 of a page's width, that of `legend_under`."""
    if not labels:
        return 0.0
    fitted, num_columns = _fitted(labels, width_in)
    return 0.17 * math.ceil(sum(label.count("\n") + 1 for label in fitted) / num_columns) + 0.1


def folded(labels: Sequence[str], num_chars: int) -> list[str]:
    """The labels, taken literally, in lines of at most so many characters."""
    return ["\n".join(wrap(literal(label), num_chars)) for label in labels]


def literal(text: str) -> str:
    """The text of a name: what is between two dollar signs would be set as mathematics, or fail as such."""
    return text.replace("$", r"\$")


_CHAR_IN, _HANDLE_IN = 0.058, 0.55  # of a legend: a character's mean width, and that of a handle with its margins


def _fitted(labels: Sequence[str], width_in: float) -> tuple[list[str], int]:
    """The labels of a legend, folded to its width, and its number of columns."""
    fitted = folded(labels, max(1, int((width_in - _HANDLE_IN) / _CHAR_IN)))
    widest_in = _CHAR_IN * max(len(line) for label in fitted for line in label.split("\n")) + _HANDLE_IN
    return fitted, max(1, min(len(labels), int(width_in / widest_in)))


def line_handle(**style: Any) -> Line2D:
    return Line2D([], [], **style)


def marker_handles(num: int) -> list[Line2D]:
    return [line_handle(**point_style(index)) for index in range(num)]


def time_unit(seconds: FloatArray) -> tuple[float, str]:
    """(factor, unit) for values in seconds: ms if all are below 10 s, else s."""
    known = seconds[~np.isnan(seconds)]
    return (1e3, "ms") if not known.size or float(known.max()) < 10.0 else (1.0, "s")


def log_if_wide(axis: Axis, values: FloatArray, ratio: float = 12.0) -> bool:
    """Sets a log scale with plain numbers if all values are positive and span more than `ratio`; returns whether."""
    known = values[~np.isnan(values)]
    wide = bool(known.size and known.min() > 0 and known.max() / known.min() > ratio)
    if wide:
        set_log(axis, float(known.min()), float(known.max()))
    return wide


def set_log(axis: Axis, low: float, high: float) -> None:
    """Sets a log scale with ticks at 1, 10, 100, and also at 3, or 2 and 5, or more, if the span is short: with two
    labels only, it would look linear."""
    set_scale = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
    set_scale("log")
    decades = math.log10(high / low) if high > low > 0 else 1.0
    spans = ((0.8, (1.0, 2.0, 3.0, 5.0, 7.0)), (0.9, (1.0, 2.0, 3.0, 5.0)), (1.6, (1.0, 2.0, 5.0)), (2.0, (1.0, 3.0)))
    axis.set_major_locator(LogLocator(subs=next((subs for span, subs in spans if decades <= span), (1.0,))))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    if decades <= 2.5:
        axis.set_minor_locator(NullLocator())


_CLOCKS = ((3 * 3600.0, 1.0, "s"), (4 * 86400.0, 3600.0, "h"), (math.inf, 86400.0, "d"))  # up to s, unit in s, unit


def name_clock(axis: Axis, span_s: float, num_chars: int = 84) -> None:
    """Labels an axis that has seconds since the start of the run, in lines of so many characters. If it spans more than
    a few hours, its ticks are at whole hours or days."""
    size, unit = next((size, unit) for most_s, size, unit in _CLOCKS if span_s <= most_s)
    axis.set_label_text("\n".join(wrap(f"time since the start of the run ({unit})", num_chars)))
    if size > 1.0:
        ticks = MaxNLocator(8, steps=[1, 2, 5, 10]).tick_values(0.0, span_s / size)
        axis.set_major_locator(MultipleLocator(size * float(ticks[1] - ticks[0])))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g}"))


def say_empty(axes: Axes, text: str = "no data") -> None:
    """Says why a panel is empty, and takes away its ticks, but not those of an axis that it shares with others."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    for axis, shared in ((axes.xaxis, axes.get_shared_x_axes()), (axes.yaxis, axes.get_shared_y_axes())):
        if len(shared.get_siblings(axes)) == 1:
            axis.set_ticks([])
