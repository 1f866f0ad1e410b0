"""This testbed's scheduler for a user's vLLM server: the class behind `scheduler_cls=real.vllm.TestbedScheduler`.

`additional_config={"testbed": {...}}` takes groups of `testbed run` (scheduler, cache, seed), `device`, and `out`: the
run folder to write, with a tape. Sizes that vLLM has already fixed (KV pool, lengths, budgets) are taken from vLLM.
"""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.logger import init_logger

from experiments.configuration.compose import compose_config, to_overrides
from experiments.configuration.config import RunConfig
from experiments.configuration.on_device import check_hits, check_in_vllm, check_steps
from experiments.configuration.policies import make_policy
from experiments.configuration.saved import MODEL_FOLDER, TRACE_FILE
from experiments.runs.in_vllm import USUAL, device_of, with_model
from experiments.serving.served_folder import ServedFolder
from experiments.wiring.build import Pools, build_scheduler
from experiments.wiring.engines import batch_limits
from experiments.wiring.foreign import policy_failure
from real.vllm.observer import describe
from real.vllm.own_loop import OwnLoop
from real.vllm.scheduler import CoreInVllm, Steering
from testbed.core.commands import Recorder
from testbed.core.request import Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.errors import ConfigError, TestbedError
from testbed.foreign_text import unknown
from testbed.traces.schema import MAX_NUM_TOKENS

KEYS: dict[str, tuple[type, ...]] = {
    "scheduler": (str, dict), "cache": (dict,), "seed": (int,), "out": (str,), "device": (str,)
}  # fmt: skip
_OWN_FLAGS = (  # a flag of vLLM's own scheduler, group and key of the same setting here, and the default
    ("policy", "scheduler", "queue_order", "fcfs"),
    ("long_prefill_token_threshold", "scheduler", "long_prefill_token_threshold", 0),
    ("watermark", "cache", "watermark", 0.0),
)
_logger = init_logger("vllm.testbed")


class TestbedScheduler(CoreInVllm):
    """The scheduler class that vLLM makes. Raises ConfigError for invalid settings, before vLLM serves a request."""

    def name_of(self, request: Any) -> str:
        """Returns vLLM's request id; if an earlier request had the same id, with a number: `id~2`."""
        name = super().name_of(request)
        self._num_named[name] += 1
        return name if self._num_named[name] == 1 else f"{name}~{self._num_named[name]}"

    def make_steering(self) -> Steering:
        self._num_named: Counter[str] = Counter()
        settings = (self.vllm_config.additional_config or {}).get("testbed", {})
        _check(settings)
        said = describe(self)
        device = settings.get("device") or _device_of(said)
        with TemporaryDirectory() as scratch:
            config, why = with_model(
                said, Path(scratch, MODEL_FOLDER), lambda model: config_in_vllm(settings, self, model, device)
            )
        if why:
            _logger.warning("%s; policies that ask for prices are told another model's", why)
        composition = make_policy("scheduler.composition", config.scheduler.composition)
        check_hits(config, composition)
        check_in_vllm(config, self.max_model_len)
        check_steps(config, composition, self.scheduler_config.max_num_batched_tokens, self.max_model_len)
        scheduler = build_scheduler(config, Pools(self.num_gpu_blocks, 0))
        records = self._records(settings.get("out"), config, scheduler, said, why)
        _logger.info("the testbed decides: scheduler=%s", config.scheduler.name)

        checks = [limits.check for limits in batch_limits(config)]

        def failed(error: BaseException) -> BaseException:
            named = error if isinstance(error, TestbedError) else policy_failure(error, config) or error
            records.failed(named)
            return named

        return OwnLoop(
            scheduler, records, _request_of, records.finish, checks=checks, failed=failed, warn=_logger.warning
        )

    @staticmethod
    def _records(
        out: str | None, config: RunConfig, scheduler: Scheduler, said: dict[str, Any], unpriced: str
    ) -> _Nothing | ServedFolder:
        if not out:
            return _Nothing()
        try:
            return ServedFolder(Path(out), config, scheduler, said, unpriced, _logger.error)
        except OSError as error:
            raise ConfigError(f'additional_config["testbed"]: out is {out}, and {error.strerror or error}') from None


def _check(settings: Any) -> None:
    """Raises ConfigError for unknown keys and values of the wrong type."""
    place = 'additional_config["testbed"]'
    if not isinstance(settings, dict):
        raise ConfigError(f"{place} is {settings!r}; it must have keys, as {{'scheduler': 'sarathi'}}")
    for key, value in settings.items():
        if key not in KEYS:
            raise ConfigError(unknown(f"{place} has an unknown key {key!r}", str(key), KEYS))
        if value == "":
            raise ConfigError(f"{place}: {key} is empty; leave it out, or say what it is to be")
        if not isinstance(value, KEYS[key]):
            wanted = " or ".join({str: "a string", dict: "keys", int: "a number"}[kind] for kind in KEYS[key])
            raise ConfigError(f"{place}: {key} is {value!r}; it must be {wanted}")


def _device_of(said: dict[str, Any]) -> str:
    try:
        return device_of(said)
    except ConfigError:
        _logger.warning("%s is not in the device library; policies that ask for prices are told an h100's, or those of "
                        'additional_config["testbed"]["device"]', said["device"]["name"])  # fmt: skip
        return "h100"


def config_in_vllm(settings: dict[str, Any], engine: CoreInVllm, model: dict[str, Any], device: str) -> RunConfig:
    """Returns the run's configuration: the user's settings, limited to the sizes of vLLM's workers. model: the group
    `model`. Raises ConfigError for a setting that contradicts vLLM's."""
    said, cache = engine.vllm_config.scheduler_config, dict(settings.get("cache") or {})
    chosen = settings.get("scheduler", "vllm_v1")
    scheduler = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    fixed = {"block_size": engine.block_size, "num_gpu_blocks": engine.num_gpu_blocks, "num_cpu_blocks": 0}
    max_len = {"max_model_len": engine.max_model_len}
    for group, asked, theirs in (("cache", cache, fixed), ("scheduler", scheduler, max_len)):
        for key, value in theirs.items():
            if asked.get(key, value) != value:
                raise ConfigError(
                    f"{group}.{key} is {asked[key]}, and vLLM's is {value}: set it there, leave it out here"
                )
    if cache.get("kv_dtype") is not None:
        raise ConfigError(
            f"cache.kv_dtype is {cache['kv_dtype']}: that is vLLM's; leave it out, and say kv_cache_dtype there"
        )
    caches = bool(engine.vllm_config.cache_config.enable_prefix_caching)
    if cache.setdefault("prefix_caching", caches) and not caches:
        raise ConfigError("cache.prefix_caching is true, and vLLM was started without: start it with prefix caching")
    overrides = {
        "scheduler": scheduler, "cache": cache | fixed, "backend": {"name": "vllm"}, "device": {"name": device}
    }  # fmt: skip
    free = compose_config(to_overrides(overrides))
    is_async = bool(said.async_scheduling)
    if ("async_scheduling" in scheduler or not is_async) and free.scheduler.async_scheduling != is_async:
        raise ConfigError(
            f"scheduler.async_scheduling of {free.scheduler.name} is {free.scheduler.async_scheduling}, and vLLM's "
            f"is {is_async}"
        )
    _check_flags(said, scheduler, cache)
    for key, most in (("max_num_seqs", said.max_num_seqs), ("max_num_batched_tokens", said.max_num_batched_tokens)):
        own = getattr(free.scheduler, key)
        if scheduler.get(key) is not None and own > most:
            raise ConfigError(f"scheduler.{key} is {own}, and vLLM was started for {most}: raise it there")
        scheduler[key] = most if own is None else min(own, most)
    scheduler |= max_len | {"async_scheduling": is_async}
    trace = {"name": "jsonl", "path": TRACE_FILE, "forced": "lengths"}
    return compose_config(to_overrides({**overrides, "seed": settings.get("seed", 0), "model": model, "trace": trace}))


def _check_flags(said: Any, scheduler: dict[str, Any], cache: dict[str, Any]) -> None:
    """Raises ConfigError for a flag that was set for vLLM's own scheduler but not for this one."""
    for flag, group, key, usual in _OWN_FLAGS:
        value = getattr(said, flag, usual)
        if value != usual and key not in (scheduler if group == "scheduler" else cache):
            raise ConfigError(
                f"vLLM was started with {flag}={value}, which only its own scheduler reads: leave it out, and say "
                f"{group}.{key} to this one"
            )
    for flag, usual in USUAL.items():
        value = getattr(said, flag, None)
        if value not in (usual, None):
            raise ConfigError(
                f"vLLM was started with {flag}={value}, which only its own scheduler reads, and this one has not: "
                "leave it out"
            )


def _request_of(name: str, request: Any, arrival_ns: int) -> Request:
    """Converts vLLM's request to ours. vLLM itself checks stop conditions; only the maximum length is known here."""
    salt, most = request.cache_salt or "", 2**31 - 1
    if request.skip_reading_prefix_cache:  # a unique salt: it shares no prefix with other requests
        salt = f"{salt} read by {name} alone"
    return Request(
        name, array("i", request.prompt_token_ids), arrival_ns=arrival_ns,
        sampling=SamplingParams(max_tokens=min(request.max_tokens, MAX_NUM_TOKENS), ignore_eos=True),
        priority=min(max(request.priority, -most), most), cache_salt=salt,
    )  # fmt: skip


class _Nothing(Recorder):
    def failed(self, error: BaseException) -> None: ...
    def finish(self) -> None: ...
