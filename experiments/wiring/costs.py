"""Builds cost models from a RunConfig, and computes the sizes that cache and cost model share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from experiments.configuration.compose import compose_from, to_overrides
from experiments.configuration.config import COSTS, RunConfig
from experiments.configuration.own_class import has_method, instantiate
from experiments.fits import fit_of
from experiments.tables.devices import device_spec
from experiments.wiring.foreign import failures_named
from sim.cost.attention import MixedWatch
from sim.cost.base import CostModel, Itemised, priced
from sim.cost.calibrated import CalibratedCost, Calibration
from sim.cost.calibration_file import load_calibration
from sim.cost.config import CalibratedConfig, ConstantConfig, LinearConfig, RooflineConfig, TablesConfig
from sim.cost.constant import ConstantCost
from sim.cost.context import CostContext
from sim.cost.drawing import filters, is_plain
from sim.cost.linear import LinearCost
from sim.cost.profiled_range import RangeWatch
from sim.cost.roofline import KVLayout, RooflineCost
from sim.cost.tables import Measured, OriginWatch, TablesCost
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError, ModelError
from testbed.foreign_text import shown, unknown
from testbed.policies.config import EstimatorConfig
from testbed.records.operators import Itemise
from testbed.specs.device import DeviceSpec
from testbed.specs.hf_config import LIKE_LLAMA, read_hf_config, why_uncounted
from testbed.specs.model import ModelSpec
from testbed.specs.operator_tables import alike, of_engine, product_dtype, read_operator_tables
from testbed.specs.quantization import fp8_scheme
from testbed.streams import draw, log_normal

MEASURED_FIELDS = (  # device fields whose change does not affect operators that were measured
    "memory_bytes_per_s", "cache_bytes", "flops_per_s", "interconnect", "interconnect_bytes_per_s",
    "interconnect_efficiency", "interconnect_latency_ns", "compute_efficiency", "fp8_efficiency", "memory_efficiency",
    "attention_efficiency", "num_sms", "attention_tile_rows", "attention_tile_keys", "mixed_attention",
    "attention_floor_ns", "decode_attention_floor_ns", "gemm_tile_rows", "gemm_floor_ns", "kernel_floor_ns",
)  # fmt: skip
_OF_RANKS = (
    "interconnect", "interconnect_bytes_per_s", "interconnect_efficiency", "interconnect_latency_ns",
    "interconnect_factor",
)  # fmt: skip
PRICED_FIELDS = (  # device fields on which only step times depend
    *MEASURED_FIELDS, "interconnect_factor", "host_link_bytes_per_s", "host_link_latency_ns", "kernel_factor",
    "step_overhead_ns",
)  # fmt: skip
ESTIMATED = ("cpu", "mi300x", "t4")  # the library's devices whose kernels nobody timed
_Cost = TypeVar("_Cost", bound=RooflineCost)
Watch = RangeWatch | OriginWatch | MixedWatch  # counts steps whose times rest on no measurement


def block_bytes(config: RunConfig) -> int:
    """Returns the bytes of one KV block on each rank."""
    cache = config.cache
    return cache.block_size * config.model.kv_bytes_per_token(cache.kv_dtype, config.tensor_parallel_size)


def check_counted(config: RunConfig) -> None:
    """Raises ModelError if a simulated model's memory and step times do not follow from its spec. Engines know better:
    their own runs are not checked."""
    model = config.model
    if config.is_simulated and (why := why_uncounted(model)):
        where = f" (in {model.path})" if model.path else ""
        raise ModelError(
            f"model {model.name}{where} cannot be simulated: {why}; choose another model, or give cost=constant and "
            "cache.num_gpu_blocks, which do not depend on it"
        )


def quantised_otherwise(model: ModelSpec) -> str:
    """Returns which checkpoint has weights quantised in a way that is not counted, and how; empty if it has none."""
    scheme = fp8_scheme(read_hf_config(model.path)[1]) if model.path else None
    return f"{model.path} has {scheme}" if isinstance(scheme, str) else ""


def build_cost(config: RunConfig) -> CostModel:
    match config.cost:
        case dict() as own:
            return _own(config, own)
        case ConstantConfig() as options:
            return ConstantCost(options)
        case LinearConfig() as options:
            return LinearCost(options, config.sliding_window)
        case CalibratedConfig() as options:
            return CalibratedCost(calibration_of(config, options), options.outside)
        case TablesConfig() as options:
            return _tables(config, options)
        case RooflineConfig() as options:
            return _roofline(RooflineCost, config, options)
    raise ConfigError("cost=recorded replays a run and prices no other step; choose another cost")


def _own(config: RunConfig, node: dict[str, Any]) -> CostModel:
    """Makes a user's own cost model. Raises ConfigError, or a PolicyError if its `bind` fails."""

    def cost(name: str, **keys: Any) -> CostModel:
        if isinstance(name, str) and name not in COSTS:
            raise ConfigError(unknown(f"cost has no option {shown(name)}", name, list(COSTS)))
        return build_cost(compose_from(config.raw, to_overrides({"cost": {"name": name, **keys}})))

    model = instantiate("cost", node)
    if not has_method(model, "price", "cost", node["_target_"]):
        raise ConfigError(f"cost: {node['_target_']} lacks price; see docs/extending.md")
    if has_method(model, "bind", "cost", node["_target_"]):
        with failures_named(config):
            size, layout = config.tensor_parallel_size, _kv_layout(config)
            model.bind(CostContext(config.model, config.device, config.seed, cost, size, layout, config.sampling))
    return cast(CostModel, model)


def watches_of(cost: CostModel | None) -> list[Watch]:
    """Returns recorders that count the steps whose times rest on no measurement: of the cost model, or of those of ours
    that a user's own one has in its attributes."""
    held = (cost, *(vars(cost).values() if hasattr(cost, "__dict__") else ()))
    unchecked = [MixedWatch(one.unchecked) for one in held if isinstance(one, RooflineCost) and one.unchecked]
    return [*(one.watch() for one in held if isinstance(one, CalibratedCost | TablesCost)), *unchecked]


def itemise(cost: CostModel | None) -> Itemise | None:
    """Returns a function from a step's shape and spans to the ns of its operators, whose sum is exactly that of the
    spans; None if the cost model has no breakdown.

    `scheduler` includes the simulated scheduler's own time (`backend.schedule_ns`). `link` is the difference between
    the time of a swap that overlapped with computation and its price: positive if it took longer, negative if it was
    hidden.
    """
    if cost is None or not hasattr(cost, "breakdown"):
        return None
    breakdown = cast(Itemised, cost).breakdown

    def of_step(shape: BatchShape, spans: Spans) -> dict[str, int]:
        price, parts = priced(cost, shape), breakdown(shape)
        priced_ns = price.total_ns
        if sum(parts.values()) != priced_ns:
            raise ConfigError(
                f"cost: {_class(cost)}.breakdown says {sum(parts.values())} ns in all of {shape}, and price "
                f"{priced_ns}; they must be equal, to the ns"
            )
        if min(parts.values(), default=0) < 0:
            name, ns = min(parts.items(), key=lambda part: part[1])
            raise ConfigError(f"cost: {_class(cost)}.breakdown says {name}={ns} of {shape}; a part is 0 ns or more")
        added = {"link": spans.swap_ns - price.swap_ns, "scheduler": spans.schedule_ns - price.schedule_ns}
        return parts | {name: parts.get(name, 0) + ns for name, ns in added.items() if ns}

    return of_step


def _class(cost: CostModel) -> str:
    return f"{type(cost).__module__}.{type(cost).__name__}"


def unread_settings(config: RunConfig) -> list[str]:
    """Returns notes about changed settings of the cost model that have no effect, each with the reason."""
    cost, is_cpu = config.cost, config.device.kind == "cpu"
    notes: list[str] = []
    if isinstance(cost, dict):
        return []  # of a user's own class nothing is known
    if not isinstance(cost, RooflineConfig):
        unread = [] if is_plain(config.sampling) else ["sampling"]
        unread += [f"device.{name}" for name in unlike_the_library(config.device, PRICED_FIELDS)]
        return [f"{key} does not change the step times of cost={config.cost_name}" for key in unread]
    if config.model.architecture in LIKE_LLAMA:
        notes.append(f"{config.model.architecture} is priced as a Llama of its sizes: its small operators differ")
    if isinstance(cost, TablesConfig):
        notes += [
            f"device.{name} changes only what tables lack: the operators of {config.device.name} were measured as it is"
            for name in unlike_the_library(config.device, MEASURED_FIELDS)
        ]
    if is_cpu:
        notes += without_effect("cost", cost, ("cuda_graphs", "kernel_launch_ns"), "a CPU, which launches nothing")
    if is_cpu or not cost.cuda_graphs:
        why = "a CPU, which has no graphs" if is_cpu else "cost.cuda_graphs=false"
        notes += without_effect("cost", cost, ("max_captured_size", "max_captured_tokens", "graph_launch_ns"), why)
    if not filters(config.sampling):
        notes += without_effect("cost", cost, ("filtering",), "sampling that has no top_k or top_p to apply")
    idle: list[tuple[str, tuple[str, ...], str]] = []  # of the cost model, of the device, with what they are
    if config.model.dtype != "fp8":
        idle.append(("fp8_gemms", ("fp8_efficiency",), "weights of more than 8 bits"))
    if config.tensor_parallel_size == 1:
        idle.append(("logits", _OF_RANKS, "device.tensor_parallel_size=1"))
    for name, of_device, why in idle:
        notes += without_effect("cost", cost, (name,), why)
        changed = [] if isinstance(cost, TablesConfig) else unlike_the_library(config.device, of_device)
        notes += [f"device.{field} has no effect with {why}" for field in changed]
    return notes


def kernels_of(config: RunConfig) -> str | None:
    """Returns what the roofline's efficiencies and floors are: "measured", of timed kernels of this device as it is, or
    "estimated". None for other cost models."""
    if not isinstance(config.cost, RooflineConfig) or isinstance(config.cost, TablesConfig):
        return None
    device = config.device
    is_timed = device_spec(device.name) is not None and device.name not in ESTIMATED
    apart = ("interconnect",) if config.model.dtype == "fp8" else ("interconnect", "fp8_efficiency")
    changed = [name for name in unlike_the_library(device, MEASURED_FIELDS) if not name.startswith(apart)]
    return "measured" if is_timed and not changed else "estimated"


def kernel_notes(config: RunConfig) -> list[str]:
    """Returns a note if a GPU's simulated step times rest on estimates of its kernels."""
    device = config.device
    if not config.is_simulated or kernels_of(config) != "estimated" or device.kind == "cpu":
        return []
    note = f"nobody timed kernels of {device.name} as it is here: its efficiencies and floors are estimates"
    if not device.gemm_floor_ns and not device.kernel_floor_ns:
        note += (
            "; without floors (device.gemm_floor_ns and kernel_floor_ns are 0) small steps come out several times too "
            "short: let its file begin with a device like it, as `defaults: [h100, _self_]`"
        )
    return [note]


def unlike_the_library(device: DeviceSpec, names: Sequence[str]) -> list[str]:
    """Returns those of the fields in which a device differs from the library's device of the same name."""
    known = device_spec(device.name)
    return [name for name in names if known is not None and getattr(device, name) != getattr(known, name)]


def without_effect(group: str, settings: Any, names: Iterable[str], why: str) -> list[str]:
    """Returns a note for each of the named settings that differs from its default. `settings`: of the group's class."""
    standard = type(settings)()
    changed = [name for name in names if getattr(settings, name) != getattr(standard, name)]
    return [f"{group}.{name} has no effect with {why}" for name in changed]


def _roofline(kind: Callable[..., _Cost], config: RunConfig, options: RooflineConfig) -> _Cost:
    """Makes a roofline model. Its CUDA graphs end at the scheduler's limits, like those of the engine.

    Raises ModelError for a model whose operators are not known."""
    check_counted(config)
    bounds = config.limits
    num_tokens = bounds.max_num_batched_tokens
    options = replace(
        options,
        max_captured_size=min(options.max_captured_size, bounds.max_num_seqs, num_tokens),
        max_captured_tokens=min(options.max_captured_tokens, num_tokens),
    )
    return kind(
        config.model,
        config.device,
        options,
        tensor_parallel_size=config.tensor_parallel_size,
        kv_layout=_kv_layout(config),
        sampling=config.sampling,
    )


def _kv_layout(config: RunConfig) -> KVLayout:
    return KVLayout(config.cache.block_size, config.cache.kv_dtype, config.sliding_window)


def _tables(config: RunConfig, options: TablesConfig) -> TablesCost:
    """Makes a cost model from operator tables of the device. Raises TestbedError if there are none for it."""
    file = options.path
    modified_ns = Path(file).stat().st_mtime_ns if file is not None and Path(file).is_file() else 0
    source = _Source(file, modified_ns, options.engine, options.version)
    shape = config.tensor_parallel_size, config.cache.kv_dtype, config.sliding_window
    device = replace(config.device, kernel_factor=1.0)  # the factor is applied to step times, not to measurements
    measured = _measured(source, config.model, device, *shape, options.mixed_attention)
    return _roofline(partial(TablesCost, measured=measured), config, options)


class _Source(NamedTuple):
    """Where tables come from: a file (with its modification time), or the installed package (tables of an engine)."""

    file: str | None
    modified_ns: int
    engine: str
    version: str | None


@lru_cache(maxsize=64)
def _measured(
    source: _Source, model: ModelSpec, device: DeviceSpec, size: int, kv_dtype: str | None, window: int | None,
    mixed_attention: str | None,
) -> Measured:  # fmt: skip
    """Looks up measured operators, once for all points of a sweep, as policies do not change operators."""
    from sim.cost.measured import measure

    if source.file is not None:
        tables = of_engine(read_operator_tables(source.file), source.engine, source.version, source.file)
    else:
        from experiments.tables.aiconfigurator import load

        dtypes = (*alike(model.dtype), product_dtype(model))
        tables = load(device.name, source.engine, source.version, kept=(dtypes, model.head_dim), option="cost.")
    if tables.device != device.name:
        raise ConfigError(
            f"cost.path: {source.file} has tables of {tables.device}, and the run's device is {device.name}; choose "
            f"device={tables.device}, or import tables of {device.name}"
        )
    if source.file is not None:  # no import of ours may have written it
        from experiments.tables.doubts import check_units

        check_units(tables, device_spec(device.name) or device)  # of the device as measured, whatever a run changes

    def make(of: ModelSpec, ranks: int) -> RooflineCost:
        layout = KVLayout(kv_dtype=kv_dtype, sliding_window=window)
        options = RooflineConfig(mixed_attention=mixed_attention)
        return RooflineCost(of, device, options, tensor_parallel_size=ranks, kv_layout=layout)

    measured = measure(tables, model, size, kv_dtype, window, make)
    if "interconnect" in unlike_the_library(device, MEASURED_FIELDS):  # another interconnect than the measured one
        return measured.replace(all_reduce=None, all_gather=None)
    return measured


def fit_file(config: RunConfig) -> Path | None:
    """Returns the file of the fit that a run's step times are of; None if they come from no fit."""
    if isinstance(options := config.cost, CalibratedConfig):
        return Path(options.path or fit_of(config.model.name, config.device.name))
    return None


def calibration_of(config: RunConfig, options: CalibratedConfig) -> Calibration:
    """Returns the fit from which a run's step times are taken. Raises ConfigError if there is none, or if it is of
    another model, device or KV cache."""
    file = str(fit_file(config))
    modified_ns = Path(file).stat().st_mtime_ns if Path(file).is_file() else 0
    calibration = _calibration(file, modified_ns)
    calibration.manifest.check_matches(
        file, model=config.model, device=config.device.name, block_size=config.cache.block_size,
        tensor_parallel_size=config.tensor_parallel_size, kv_dtype=config.cache.kv_dtype or config.model.dtype,
        sliding_window=config.sliding_window,
    )  # fmt: skip
    if options.repeated_saving is not None:
        calibration = replace(calibration, repeated_saving=options.repeated_saving)
    return calibration.scaled(options.host_factor, options.device_factor)


@lru_cache(maxsize=8)
def _calibration(file: str, modified_ns: int) -> Calibration:
    """Reads a calibration. Cached, as a run needs it twice: for its step times and its policies."""
    return load_calibration(file)


class CostEstimator:
    """`testbed.core.interfaces.Estimator` over a cost model: every estimate is the time of a separate step."""

    def __init__(self, cost: CostModel, error: EstimatorConfig, seed: int) -> None:
        self._cost, self._error, self._seed = cost, error, seed
        self._was_asked = False

    def notes(self) -> list[str]:
        """Returns a note if policies asked, and were told the very times that a simulation then takes."""
        if not self._was_asked or self._error != EstimatorConfig():
            return []
        return [
            "foresight: policies asked what a step takes and were told its exact time, which no engine knows; "
            "scheduler.estimator.factor and .sigma make it wrong"
        ]

    def _told(self, ns: int, shape: BatchShape) -> int:
        self._was_asked = True
        error = self._error
        noise = log_normal(draw(self._seed, "estimator", repr(shape)), error.sigma) if error.sigma else 1.0
        return round(ns * (error.factor * noise))

    def step_ns(self, shape: BatchShape) -> int:
        return self._told(priced(self._cost, shape).total_ns, shape)

    def recompute_ns(self, start: int, num_tokens: int) -> int:
        return self.step_ns(BatchShape(0, 0, (PrefillChunk(start, num_tokens),), 1)) if num_tokens > 0 else 0

    def swap_ns(self, num_blocks: int) -> int:
        """Returns the time to swap blocks out (one direction): the transfer part of the step time."""
        shape = BatchShape(0, 0, (), 0, num_blocks_swapped_out=num_blocks)
        return self._told(priced(self._cost, shape).swap_ns, shape)
