"""The configuration of a run: Hydra's groups and schemas, and the typed object that other packages use.

`register` fills Hydra's ConfigStore. `RunConfig.from_container` is the only conversion from Hydra's nodes to the
components' dataclasses: no DictConfig leaves this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import MISSING, OmegaConf

from experiments.configuration.settings import (
    GONE,
    AgenticTraceConfig,
    MooncakeTraceConfig,
    OwnTraceConfig,
    RecordConfig,
    ReportConfig,
    ShareGPTTraceConfig,
    SloConfig,
    SyntheticTraceConfig,
    TensorParallelConfig,
    TraceConfig,
)
from experiments.configuration.structured import editable, freeze
from real.config import RealConfig
from real.vllm.config import VllmConfig
from sim.config import SimConfig
from sim.cost.config import CalibratedConfig, ConstantConfig, LinearConfig, RecordedConfig, RooflineConfig, TablesConfig
from testbed.blocks.config import CacheConfig
from testbed.checks import MAX_SEED, choose, require_whole
from testbed.core.limits import Limits
from testbed.core.sampling import SamplingParams
from testbed.errors import ConfigError
from testbed.foreign_text import unknown
from testbed.policies.config import SchedulerConfig, resolve_limits
from testbed.specs.device import DeviceSpec
from testbed.specs.hf_config import load_hf_config, recommended
from testbed.specs.model import KV_DTYPE_BYTES, ModelSpec
from testbed.traces.arrivals import ArrivalConfig
from testbed.traces.generator_config import SyntheticConfig
from testbed.traces.readers import READERS
from testbed.traces.readers.own import OWN

TRACES: dict[str, tuple[type, ...]] = {  # the dataclasses whose fields are a trace's keys; its settings are of the last
    **dict.fromkeys(READERS, (TraceConfig,)),
    **dict.fromkeys(OWN, (OwnTraceConfig,)),
    "synthetic": (SyntheticConfig, SyntheticTraceConfig),
    "lengths": (ArrivalConfig, TraceConfig),
    "agentic": (ArrivalConfig, AgenticTraceConfig),
    "mooncake": (MooncakeTraceConfig,),
    "sharegpt": (ShareGPTTraceConfig,),
}
COSTS: dict[str, type] = {
    "roofline": RooflineConfig, "tables": TablesConfig, "calibrated": CalibratedConfig, "linear": LinearConfig,
    "constant": ConstantConfig, "recorded": RecordedConfig,
}  # fmt: skip
# a user's own class stays a dict: `_target_` and its parameters
CostConfig = RooflineConfig | CalibratedConfig | LinearConfig | ConstantConfig | RecordedConfig | dict[str, Any]
BACKENDS: dict[str, type] = {"sim": SimConfig, "real": RealConfig, "vllm": VllmConfig}
GROUPS = ("backend", "scheduler", "cache", "trace", "model", "device", "cost", "sampling", "record", "slo", "report")
FILE_KEYS = ("path", "lengths_from", "tokenizer", "run")  # keys, at any depth, that name files of a run
CLASSES = ("cost", "trace")  # groups that may be a user's own class
# sampling parameters that apply to text; runs of traces produce no text and do not have these keys
OF_TEXTS = ("stop", "include_stop_str_in_output", "skip_special_tokens", "length_penalty")
JUDGING = ("slo", "report")  # groups that evaluate a run and do not change it


@dataclass
class Root:
    """The top level of the configuration. Each group holds the values of its chosen option."""

    backend: Any = MISSING
    scheduler: Any = MISSING
    cache: Any = MISSING
    trace: Any = MISSING
    model: Any = MISSING
    device: Any = MISSING
    cost: Any = MISSING
    sampling: Any = MISSING
    record: Any = MISSING
    slo: Any = MISSING
    report: Any = MISSING
    seed: int = 0
    overwrite: bool = False  # replace an existing run in the folder, once the new one is complete
    allow_ignored: bool = False  # exit with 0 even if requests ended as ignored
    points_per_job: int | None = None  # of a sweep; null: one on a cluster, no limit on one machine


@dataclass
class SweeperConfig:
    """The schema of `hydra/sweeper=testbed` (experiments/plugins)."""

    _target_: str = "hydra_plugins.testbed_sweeper.PointsSweeper"
    params: dict[str, str] | None = None


@cache
def register() -> None:
    """Registers every structured option with Hydra, once. An option's schema is made on first access."""
    OmegaConf.register_new_resolver("recommended", recommended, replace=True)
    store = ConfigStore.instance()
    store.store(name="_root", node=Root)
    store.store(group="hydra/sweeper", name="testbed", node=SweeperConfig)
    for group, classes in structured_options().items():
        options = _Options(group, classes)
        options.update(store.repo.get(group, {}))  # options that the user registered before
        store.repo[group] = options


def structured_options() -> dict[str, dict[str, tuple[type, ...]]]:
    """Returns, by group and option, the classes whose fields are the option's keys. Fields of later classes win."""
    return {
        "backend": {name: (cls, _Name) for name, cls in BACKENDS.items()},
        "scheduler": {"_schema": (SchedulerConfig,)},
        "cache": {"default": (CacheConfig,)},
        "trace": TRACES,
        "model": {"_schema": (ModelSpec,)},
        "device": {"_schema": (TensorParallelConfig, DeviceSpec)},
        "cost": {name: (cls, _Name) for name, cls in COSTS.items()},
        "sampling": {"default": (_Name, SamplingParams)},
        "record": {"default": (RecordConfig,)},
        "slo": {"default": (SloConfig,)},
        "report": {"default": (ReportConfig,)},
    }


@dataclass(frozen=True)
class _Name:
    """The key `name` (the option's name) for groups whose components have no such field."""

    name: str = ""


class _Options(dict[str, Any]):
    """A group of Hydra's ConfigStore: file names and their ConfigNodes. A node is made on first access, because only
    the names of most options are ever used."""

    def __init__(self, group: str, classes: dict[str, tuple[type, ...]]) -> None:
        super().__init__({f"{name}.yaml": None for name in classes})
        self._group, self._classes = group, classes

    def __getitem__(self, file: str) -> ConfigNode:
        made: ConfigNode | None = super().__getitem__(file)
        if made is None:
            name = file.removesuffix(".yaml")
            twin = editable(*self._classes[name], without=OF_TEXTS)
            if hasattr(twin, "name") and not name.startswith("_"):
                twin.name = name
            made = self[file] = ConfigNode(file, OmegaConf.structured(twin), self._group, None, None)
        return made

    def keys(self) -> Any:
        """Returns the options that Hydra's help lists: without the schemas (`_…`), which files refer to by name."""
        return dict.fromkeys(name for name in self if not name.startswith("_")).keys()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Options:
        return self  # no copy is needed: Hydra copies each node again when it loads it


@dataclass(frozen=True)
class RunConfig:
    """The typed configuration of one run. `raw` is the resolved configuration as plain containers, as in config.yaml.

    overwrite, allow_ignored and points_per_job control the command, not the run: they are not part of `raw`.
    """

    backend: SimConfig | RealConfig | VllmConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    trace: TraceConfig
    model: ModelSpec
    device: DeviceSpec
    tensor_parallel_size: int
    cost: CostConfig
    sampling: SamplingParams
    record: RecordConfig
    slo: SloConfig
    report: ReportConfig
    seed: int
    overwrite: bool
    allow_ignored: bool
    raw: dict[str, Any]

    @property
    def is_real(self) -> bool:
        return isinstance(self.backend, RealConfig)

    @property
    def is_simulated(self) -> bool:
        return isinstance(self.backend, SimConfig)

    @property
    def speed(self) -> float:
        """How many times as fast as its clock the trace is replayed; 1 in a simulation."""
        return 1.0 if isinstance(self.backend, SimConfig) else self.backend.speed

    @property
    def cost_name(self) -> str:
        """The name of the cost option, or of the user's class."""
        return str(self.raw["cost"].get("name") or self.raw["cost"].get("_target_"))

    @property
    def recorded_run(self) -> str | None:
        """The folder of the real run that `cost=recorded` replays; None for other cost models."""
        return self.cost.run if isinstance(self.cost, RecordedConfig) else None

    @property
    def limits(self) -> Limits:
        """The scheduler's limits per step, and the maximum length of a request."""
        return resolve_limits(self.scheduler, self.model.max_length)

    @property
    def watermark(self) -> float:
        """The share of KV blocks that admissions leave free: `cache.watermark`, else the scheduler's."""
        return self.scheduler.watermark if self.cache.watermark is None else self.cache.watermark

    @property
    def sliding_window(self) -> int | None:
        """The attention window in tokens: `cache.sliding_window`, else the model's."""
        return self.model.sliding_window if self.cache.sliding_window is None else self.cache.sliding_window

    @property
    def forced(self) -> str:
        """How outputs are forced (`trace.forced`). In vLLM, `tokens` means `lengths`: its tokens cannot be forced."""
        return "lengths" if self.is_vllm and self.trace.forced == "tokens" else self.trace.forced

    @property
    def is_vllm(self) -> bool:
        return isinstance(self.backend, VllmConfig)

    @classmethod
    def from_container(cls, raw: dict[str, Any]) -> RunConfig:
        """Converts and validates a resolved configuration. Raises ConfigError with a one-line message."""
        options = {name: bool(raw.get(name, False)) for name in ("overwrite", "allow_ignored")}
        raw = {key: value for key, value in raw.items() if key not in ("experiment", "points_per_job", *options)}
        raw = {**{group: {} for group in JUDGING}, **raw}  # older configurations do not have these groups
        missing = [group for group in GROUPS if not isinstance(raw.get(group), dict)]
        if missing:
            raise ConfigError(f"the configuration lacks {', '.join(missing)}")
        tops = [item.name for item in fields(Root)]
        for key in raw:
            if key not in tops:
                raise ConfigError(unknown(f"unknown key {key!r}", key, tops))
        for group in GROUPS:
            _refuse_strays(group, raw[group])
        name = raw["backend"].get("name")
        choose("backend", name, BACKENDS)
        model = _model(raw["model"])
        cache = freeze(CacheConfig, "cache", raw["cache"])
        if cache.kv_dtype is not None:
            choose("cache.kv_dtype", cache.kv_dtype, KV_DTYPE_BYTES)
        trace_class = TRACES.get(raw["trace"].get("name", ""), (TraceConfig,))[-1]
        report = freeze(ReportConfig, "report", raw["report"])
        for key in report.replicates:
            _refuse_unknown_key(key, raw)
        record, slo = freeze(RecordConfig, "record", raw["record"]), freeze(SloConfig, "slo", raw["slo"])
        if (gaps := slo.of("itl_max_s")) and not record.token_times:
            raise ConfigError(
                f"slo.itl_max_s is {gaps[0]:g}, and with record.token_times=false no gap between tokens is "
                "known; leave one of them out"
            )
        device = freeze(DeviceSpec, "device", raw["device"])
        sampling = freeze(SamplingParams, "sampling", raw["sampling"])
        for token, _ in sampling.logit_bias:
            if token >= model.vocab_size:
                raise ConfigError(
                    f"sampling.logit_bias names token {token}; the vocabulary of model {model.name} has ids 0 to "
                    f"{model.vocab_size - 1}"
                )
        return cls(
            backend=_placed(freeze(BACKENDS[name], "backend", raw["backend"]), device),
            scheduler=freeze(SchedulerConfig, "scheduler", raw["scheduler"]),
            cache=cache,
            trace=freeze(trace_class, "trace", raw["trace"]),
            model=model,
            device=device,
            tensor_parallel_size=freeze(TensorParallelConfig, "device", raw["device"]).tensor_parallel_size,
            cost=_cost(raw["cost"]),
            sampling=sampling,
            record=record,
            slo=slo,
            report=report,
            seed=require_whole("seed", raw.get("seed", 0), 0, MAX_SEED),
            **options,
            raw=raw,
        )

    def with_values(self, values: Mapping[str, Any]) -> RunConfig:
        """Returns the configuration with these values, by `group.key`."""
        raw = {**self.raw, "overwrite": self.overwrite, "allow_ignored": self.allow_ignored}
        for key, value in values.items():
            group, _, name = key.partition(".")
            raw[group] = {**raw[group], name: value}
        return RunConfig.from_container(raw)


def _refuse_unknown_key(key: str, raw: dict[str, Any]) -> None:
    """Raises ConfigError if `report.replicates` names a key that does not exist."""
    there: Any = raw
    parts = key.split(".")
    for number, part in enumerate(parts):
        if not isinstance(there, dict):
            return  # inside a list or an unset value: not checked
        if part not in there:
            known = [".".join([*parts[:number], name]) for name in there]
            raise ConfigError(unknown(f"report.replicates has {key!r}, which this trace has not", key, known))
        there = there[part]


def _refuse_strays(group: str, values: dict[str, Any]) -> None:
    """Raises ConfigError for a key that nothing reads, whether added with `+` or given in a file."""
    if "_target_" in values and group not in CLASSES:
        raise ConfigError(whole_class(group))
    if "_target_" in values:
        return  # a user's class has its own parameters
    register()
    options = ConfigStore.instance().repo[group]
    files = [file for file in (f"{values.get('name')}.yaml", "default.yaml", "_schema.yaml") if file in options]
    if not files:
        return  # an unknown name: rejected where the group is built
    known = list(options[files[0]].node)
    for key in values:
        if key not in known:
            if f"{group}.{key}" in GONE:
                raise ConfigError(f"{group}.{key} {GONE[f'{group}.{key}']}; leave it out")
            raise ConfigError(unknown(f"unknown key '{group}.{key}'", key, known))


def whole_class(group: str) -> str:
    """Returns the error text for a class in place of a whole group."""
    if group == "scheduler":
        return (
            "scheduler._target_: the scheduler is always the testbed's; a class of your own is one of its policies, as "
            "scheduler.queue_order={_target_: mine.Order} (docs/extending.md)"
        )
    if group not in CLASSES:
        return f"{group}._target_: no class of your own stands for {group}; give its keys (`testbed run --help`)"
    return (
        f"{group}._target_: {group} is a whole group, so a class of your own for it goes into a file of your own "
        f"folder, as my_conf/{group}/mine.yaml; choose it with --config-dir=my_conf {group}=mine (docs/extending.md)"
    )


def _placed(backend: Any, device: DeviceSpec) -> Any:
    """Returns the backend's options; an engine that may choose its device runs on the CPU if the user named one."""
    is_free = isinstance(backend, RealConfig) and backend.device == "auto"
    return replace(backend, device="cpu") if is_free and device.kind == "cpu" else backend


def _cost(values: dict[str, Any]) -> CostConfig:
    if "_target_" in values:
        return values
    name = values.get("name", "")
    if name not in COSTS:
        raise ConfigError(unknown(f"cost is {name!r}", name, list(COSTS)))
    made: CostConfig = freeze(COSTS[name], "cost", values)
    return made


def _model(values: dict[str, Any]) -> ModelSpec:
    """Returns the model's shape. A checkpoint or config.json at `model.path` overrides it; the name is its folder's."""
    spec = freeze(ModelSpec, "model", values)
    if spec.path is None:
        return spec
    shape, place = load_hf_config(spec.path), Path(spec.path).absolute()
    try:
        return replace(spec, name=(place.parent if place.suffix == ".json" else place).name, **shape)
    except ConfigError as error:
        raise ConfigError(f"{spec.path}: {error}") from None
