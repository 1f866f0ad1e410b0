"""This testbed's scheduler for a vLLM of one's own: what `scheduler_cls=real.vllm.TestbedScheduler` means.

`additional_config={"testbed": {...}}` has the keys of `testbed run` (scheduler, cache, seed), and `out`: a run folder
to write, with tape. What vLLM has decided already (pool, lengths, budgets) is taken from vLLM.
"""

from __future__ import annotations

import json
import os
from array import array
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.logger import init_logger

from analysis.load import Run
from experiments.build import Pools, build_scheduler
from experiments.compose import compose_config, to_overrides
from experiments.config import RunConfig
from experiments.environment import describe_machine
from experiments.observe.importing import device_of, manifest_in_vllm, with_model
from experiments.on_device import check_hits, check_in_vllm, check_steps
from experiments.policies import make_policy
from experiments.run_folder import MODEL_FOLDER, TRACE_FILE, claim, refuse_overwrite, write_json
from real.vllm.observer import describe
from real.vllm.own_loop import OwnLoop
from real.vllm.scheduler import CoreInVllm, Steering
from testbed import compiled
from testbed.core.outcome import Finished, FinishReason
from testbed.core.request import Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.errors import ConfigError
from testbed.foreign_text import unknown
from testbed.records.recorder import RunRecorder
from testbed.records.recorders import NoRecords, together
from testbed.records.schema import decision
from testbed.records.tape import TapeWriter
from testbed.traces.arrange import arrange
from testbed.traces.fingerprint import fingerprint
from testbed.traces.readers.own import read_jsonl
from testbed.traces.schema import Span, TokenIds, Trace, TraceRequest
from testbed.traces.serialize import row_to_json, write_jsonl

KEYS: dict[str, tuple[type, ...]] = {
    "scheduler": (str, dict), "cache": (dict,), "seed": (int,), "out": (str,), "device": (str,)
}  # fmt: skip
_OWN_FLAGS = (  # of vLLM's own scheduler, with the keys that say it to ours, and what says nothing
    ("policy", "scheduler", "queue_order", "fcfs"),
    ("long_prefill_token_threshold", "scheduler", "long_prefill_token_threshold", 0),
    ("watermark", "cache", "watermark", 0.0),
)
_BOUNDS = "of requests that had not ended, outputs are as long as they had leave for"
_logger = init_logger("vllm.testbed")


class TestbedScheduler(CoreInVllm):
    """Made by vLLM. Raises ConfigError, before vLLM serves anything, for settings that cannot be."""

    def make_steering(self) -> Steering:
        settings = (self.vllm_config.additional_config or {}).get("testbed") or {}
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
        return OwnLoop(scheduler, records, _request_of, records.finish)

    @staticmethod
    def _records(
        out: str | None, config: RunConfig, scheduler: Scheduler, said: dict[str, Any], unpriced: str
    ) -> _Nothing | _Folder:
        if not out:
            return _Nothing()
        try:
            return _Folder(Path(out), config, scheduler, said, unpriced)
        except OSError as error:
            raise ConfigError(f'additional_config["testbed"]: out is {out}, and {error.strerror or error}') from None


def _check(settings: Any) -> None:
    """Raises ConfigError for settings that are none."""
    place = 'additional_config["testbed"]'
    if not isinstance(settings, dict):
        raise ConfigError(f"{place} is {settings!r}; it must have keys, as {{'scheduler': 'sarathi'}}")
    for key, value in settings.items():
        if key not in KEYS:
            raise ConfigError(unknown(f"{place} has an unknown key {key!r}", key, KEYS))
        if not isinstance(value, KEYS[key]):
            wanted = " or ".join({str: "a text", dict: "keys", int: "a number"}[kind] for kind in KEYS[key])
            raise ConfigError(f"{place}: {key} is {value!r}; it must be {wanted}")


def _device_of(said: dict[str, Any]) -> str:
    try:
        return device_of(said)
    except ConfigError:
        _logger.warning("%s is not in the device library; policies that ask for prices are told an h100's, or those of "
                        'additional_config["testbed"]["device"]', said["device"]["name"])  # fmt: skip
        return "h100"


def config_in_vllm(
    settings: dict[str, Any], engine: CoreInVllm, model: dict[str, Any], device: str
) -> RunConfig:  # fmt: skip
    """The run's configuration: what was asked for, within what vLLM's workers were sized for. model: of that group."""
    said, cache = engine.vllm_config.scheduler_config, dict(settings.get("cache") or {})
    chosen = settings.get("scheduler", "vllm_v1")
    scheduler = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    fixed = {"block_size": engine.block_size, "num_gpu_blocks": engine.num_gpu_blocks, "num_cpu_blocks": 0}
    for key, value in fixed.items():
        if cache.get(key, value) != value:
            raise ConfigError(f"cache.{key} is {cache[key]}, and vLLM's is {value}: set it there, leave it out here")
    if scheduler.get("async_scheduling", said.async_scheduling) != said.async_scheduling:
        raise ConfigError(
            f"scheduler.async_scheduling is {scheduler['async_scheduling']}, and vLLM's is {said.async_scheduling}"
        )
    caches = bool(engine.vllm_config.cache_config.enable_prefix_caching)
    if cache.setdefault("prefix_caching", caches) and not caches:
        raise ConfigError("cache.prefix_caching is true, and vLLM was started without: start it with prefix caching")
    overrides = {"scheduler": scheduler, "cache": cache | fixed, "backend": {"name": "vllm"}}
    free = compose_config(to_overrides({**overrides, "device": {"name": device}}))
    _check_flags(said, scheduler, cache)
    for key, most in (("max_num_seqs", said.max_num_seqs), ("max_num_batched_tokens", said.max_num_batched_tokens)):
        wanted = scheduler.get(key)
        if wanted is not None and wanted > most:
            raise ConfigError(f"scheduler.{key} is {wanted}, and vLLM was started for {most}: raise it there")
        own = getattr(free.scheduler, key)
        scheduler[key] = most if own is None else min(own, most)
    scheduler |= {"max_model_len": engine.max_model_len, "async_scheduling": bool(said.async_scheduling)}
    return compose_config(
        to_overrides(
            {
                **overrides, "device": {"name": device}, "seed": settings.get("seed", 0),
                "model": model,
                "trace": {"name": "jsonl", "path": TRACE_FILE, "forced": "lengths"},
            }
        )
    )  # fmt: skip


def _check_flags(said: Any, scheduler: dict[str, Any], cache: dict[str, Any]) -> None:
    """Refuses what vLLM's own scheduler was told and this one was not. Raises ConfigError."""
    for flag, group, key, usual in _OWN_FLAGS:
        value = getattr(said, flag, usual)
        if value != usual and key not in (scheduler if group == "scheduler" else cache):
            raise ConfigError(
                f"vLLM was started with {flag}={value}, which only its own scheduler reads: leave it out, and say "
                f"{group}.{key} to this one"
            )


def _request_of(name: str, request: Any, arrival_ns: int) -> Request:
    """Ours of one of vLLM's. vLLM judges who stops; the length it may have at most is known."""
    salt = request.cache_salt or ""
    if request.skip_reading_prefix_cache:  # it reads no prefix of another
        salt = f"{salt} read by {name} alone"
    return Request(
        name, array("i", request.prompt_token_ids), arrival_ns=arrival_ns,
        sampling=SamplingParams(max_tokens=request.max_tokens, ignore_eos=True), priority=request.priority,
        cache_salt=salt,
    )  # fmt: skip


class _Nothing(NoRecords):
    def finish(self) -> None: ...


class _Trace(NoRecords):
    """trace.jsonl, a row for each request as it comes, with as many tokens of output as it has leave for; in the end
    with those that came."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w", encoding="utf-8")
        self._num = 0
        self._outputs: dict[str, array[int]] = {}
        self._cancelled_ns: dict[str, int] = {}  # after their arrivals

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self._num += 1
        row = TraceRequest(
            request.request_id, request.arrival_ns, (TokenIds(array("i", request.prompt_token_ids)),),
            Span(self._num, 0, request.sampling.max_tokens or 1), priority=request.priority,
            cache_salt=request.cache_salt or None,
        )  # fmt: skip
        fields = row_to_json(row)
        fields.pop("place", None)
        self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")
        self._file.flush()

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for one in finished:
            name = one.request.request_id
            if len(one.output_token_ids):
                self._outputs[name] = array("i", one.output_token_ids)
            if one.reason is FinishReason.ABORT:
                self._cancelled_ns[name] = max(1, now_ns - one.request.arrival_ns)

    def close(self) -> None:
        self._file.close()

    def finish(self) -> Trace | None:
        """Writes what came of the requests; the whole trace, or None of none."""
        self.close()
        if not self._num:
            return None
        rows = [
            row._replace(
                output=row.output if (output := self._outputs.get(row.request_id)) is None else TokenIds(output),
                cancel_after_ns=self._cancelled_ns.get(row.request_id),
                place="",
            )
            for row in read_jsonl(self._path)
        ]
        written = self._path.with_suffix(".tmp")
        write_jsonl(arrange(self._path.name, rows), written)
        os.replace(written, self._path)
        return read_jsonl(self._path)


class _Folder:
    """A run folder that is written as vLLM serves. A killed engine leaves one whose tape can be replayed."""

    def __init__(
        self, folder: Path, config: RunConfig, scheduler: Scheduler, said: dict[str, Any], unpriced: str
    ) -> None:
        self._folder, self._config, self._scheduler = folder.absolute(), config, scheduler
        refuse_overwrite(self._folder, overwrite=False, key="out", allow=None)
        raw = config.raw
        raw["trace"]["path"] = str(self._folder / TRACE_FILE)
        if raw["model"].get("path"):  # else it has no price here
            raw["model"]["path"] = str(self._folder / MODEL_FOLDER)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / MODEL_FOLDER).mkdir(exist_ok=True)
        write_json(self._folder / MODEL_FOLDER / "config.json", said["model"]["hf_config"])
        claim(self._folder, config)
        self._recorder = RunRecorder(self._folder)
        self._tape = TapeWriter(self._folder / "tape.jsonl", decision, is_live=True)
        self._trace = _Trace(self._folder / TRACE_FILE)
        self._all = together([self._recorder, self._tape, self._trace])
        self.arrived, self.aborted = self._all.arrived, self._all.aborted
        self.committed, self.ended = self._all.committed, self._all.ended
        self._manifest = self._describe(said) | {"unpriced": unpriced or None}
        write_json(self._folder / "manifest.json", self._manifest)

    def finish(self) -> None:
        """vLLM shuts down: the folder is closed."""
        self._recorder.close()
        self._tape.close()
        is_whole, scheduler, prefixes = not self._scheduler.has_work, self._scheduler, self._scheduler.blocks.prefixes
        trace = self._trace.finish()
        self._manifest |= {
            "status": "complete" if is_whole else "partial",
            "trace": {
                "name": TRACE_FILE, "num_requests": 0 if trace is None else trace.num_requests,
                "fingerprint": None if trace is None else fingerprint(trace),
                "notes": [] if is_whole else [_BOUNDS],
            },
            "num_steps": scheduler.num_steps,
            "num_sent": self._recorder.num_sent,
            "prefix_cache": {
                "queried_tokens": prefixes.num_queried_tokens, "hit_tokens": prefixes.num_hit_tokens
            },
            "digest": f"{scheduler.digest:016x}",
        }  # fmt: skip
        write_json(self._folder / "manifest.json", self._manifest)
        if trace is not None:
            write_json(self._folder / "summary.json", Run(self._folder, self._config.raw, self._manifest).summarise())
        if is_whole:
            (self._folder / "done").write_text(f"{scheduler.digest:016x}\n")

    def _describe(self, said: dict[str, Any]) -> dict[str, Any]:
        config, core = self._config, compiled.current()
        return manifest_in_vllm(said, config, "scheduler_cls=real.vllm.TestbedScheduler") | {
            "status": "partial", "created": datetime.now().astimezone().isoformat(timespec="seconds"),
            "core": core.mode, "compiler": core.why if core.mode == "compiled" else None,
            "machine": describe_machine(), "model": Path(said["model"]["name"]).name, "attention": "vllm",
            "trace": {"name": TRACE_FILE, "num_requests": None, "fingerprint": None, "notes": [_BOUNDS]},
            "num_steps": 0, "num_sent": 0, "prefix_cache": None,
        }  # fmt: skip
