"""What can be chosen can be built, has the names that scripts rely on, and a slip of the pen is one line."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, cast

import hydra
import pytest
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from experiments import simulate
from experiments.configuration import compose
from experiments.configuration.compose import compose_config, to_overrides
from experiments.configuration.config import GROUPS, RunConfig, register
from experiments.configuration.options import options
from experiments.runs.run import execute
from experiments.wiring.build import build_scheduler, simulated_pools
from experiments.wiring.costs import build_cost
from real.config import RealConfig
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError, TestbedError
from tests.experiments.kit import REAL, SHORT, TINY, Say, config_of, manifest_of

register()

# What users and their scripts count on: dotted key and default.
CONTRACT: dict[str, Any] = {
    "backend.name": "sim",
    "scheduler.name": "vllm_v1",
    "scheduler.max_num_seqs": 256,
    "scheduler.max_num_batched_tokens": 2048,
    "scheduler.max_model_len": None,
    "scheduler.preemption": "auto",
    "scheduler.queue_order": "fcfs",
    "scheduler.long_prefill_token_threshold": 0,
    "scheduler.max_num_partial_prefills": 1,
    "cache.block_size": 16,
    "cache.num_gpu_blocks": None,
    "cache.num_cpu_blocks": None,
    "cache.swap_space_gib": 4.0,
    "cache.gpu_memory_utilization": 0.9,
    "cache.watermark": None,
    "cache.prefix_caching": True,
    "cache.eviction": "lru",
    "trace.name": "synthetic",
    "trace.path": None,
    "trace.limit": None,
    "trace.rate_scale": 1.0,
    "model.name": "qwen3_0.6b",
    "model.path": None,
    "device.name": "h100",
    "device.tensor_parallel_size": 1,
    "cost.name": "roofline",
    "record.decisions": False,
    "record.token_times": True,
    "seed": 0,
}
NAMES = {
    "backend": {"sim", "real"},
    "scheduler": {"vllm_v1", "prefill_first", "decode_first", "unified"},
    "trace": {"synthetic", "azure", "burstgpt", "mooncake", "bailian", "sharegpt", "jsonl", "csv", "parquet",
              "servegen", "lengths", "agentic"},
    "model": {"qwen3_0.6b", "qwen3_8b", "qwen3_32b", "llama3.1_8b", "opt_125m", "tiny"},
    "device": {"h100", "h200", "a100", "rtx4090", "rtx_pro_6000", "cpu"},
    "cost": {"roofline", "recorded", "linear", "constant"},
}  # fmt: skip


def test_the_names_that_are_a_contract_have_their_defaults() -> None:
    raw = compose_config([]).raw
    for key, default in CONTRACT.items():
        node: Any = raw
        for name in key.split("."):
            assert name in node, f"{key} is gone"
            node = node[name]
        assert node == default, key
        assert type(node) is type(default), key


@pytest.mark.parametrize("group", NAMES)
def test_the_options_that_are_a_contract_are_there(group: str) -> None:
    assert NAMES[group] <= set(options(group))


def test_constant_cost_takes_its_step_in_seconds() -> None:
    assert compose_config(["cost=constant", "cost.step_s=1"]).raw["cost"]["step_s"] == 1.0


@cache
def chosen(option: str) -> dict[str, Any]:
    return config_of((option,), cache__num_gpu_blocks=100, trace__num_requests=1).raw


@cache
def typed(option: str) -> RunConfig:
    return RunConfig.from_container(chosen(option))


@pytest.mark.parametrize("device", options("device"))
def test_every_model_is_priced_on_every_device(device: str) -> None:
    for model in options("model"):
        cost = build_cost(replace(typed(f"device={device}"), model=typed(f"model={model}").model))
        assert cost.price(BatchShape(3, 900, (PrefillChunk(0, 40),), 4)).forward_ns >= 1, model
        assert cost.price(BatchShape(3, 900, (), 3)).forward_ns >= 1, model


@pytest.mark.parametrize("seed", range(3))
def test_options_put_together_are_what_hydra_composes_of_them(seed: int) -> None:
    draw = Random(seed)
    one, other = ([f"{group}={draw.choice(options(group))}" for group in GROUPS] for _ in range(2))
    mixed = tuple(draw.choice(pair) for pair in zip(one, other, strict=True) if draw.random() < 0.7)
    for choices in ((), tuple(one), tuple(other)):
        compose._composed(choices, ())
    with compose.hydra_app():
        expected = hydra.compose("config", overrides=list(mixed))
    found = compose._composed(mixed, ())
    assert found == expected
    assert types(found) == types(expected)


def test_an_option_of_another_store_changes_no_later_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have a part in any group."""
    register()
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", deepcopy(store.repo))
    node = {"cache": {"block_size": 64}, "seed": 7}
    store.store(group="report", name="far_reaching", package="_global_", node=node)
    before = compose._composed(("model=tiny", "device=a100"), ())
    assert compose._composed(("report=far_reaching",), ()).cache.block_size == 64
    compose._composed.cache_clear()
    assert compose._composed(("model=tiny", "device=a100"), ()) == before


def types(node: DictConfig) -> dict[str, Any]:
    """The type that each key must have, and the types of those in it."""
    return {
        key: (type(child), child._metadata.ref_type, child._metadata.object_type, child._metadata.optional)
        if not isinstance(child, DictConfig) or child._is_none()
        else (child._metadata.object_type, types(child))
        for key in map(str, node)
        for child in [cast(Any, node._get_node(key))]
    }


@pytest.mark.parametrize(("scheduler", "cost"), zip(options("scheduler"), cycle(["roofline", "linear", "constant"])))
def test_every_scheduler_runs_and_at_every_price(tmp_path: Path, scheduler: str, cost: str) -> None:
    result = execute(config_of((*TINY, *SHORT, f"scheduler={scheduler}", f"cost={cost}")), tmp_path / "run")
    assert result.exit_status == 0
    assert manifest_of(tmp_path / "run")["scheduler"] == scheduler


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_shipped_experiment_is_simulated(tmp_path: Path, experiment: str) -> None:
    config = config_of((f"experiment={experiment}",), trace__num_requests=12)
    assert execute(config, tmp_path / "run").exit_status == 0


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_shipped_experiment_runs_on_the_engine(tmp_path: Path, experiment: str) -> None:
    pytest.importorskip("torch")
    shape = ("model=tiny", "model.hidden_size=64", "model.intermediate_size=96", "model.num_hidden_layers=2")
    config = config_of((f"experiment={experiment}", *shape, *REAL), trace__num_requests=6, trace__max_output_tokens=32)
    assert execute(config, tmp_path / "run").exit_status == 0


def test_python_settings_are_overrides() -> None:
    settings = {
        "scheduler": "decode_first",
        "cache": {"block_size": 32, "watermark": None, "prefix_caching": False},
        "cost": {"name": "constant", "step_s": 0.25},
        "trace": {"prompt": {"kind": "constant", "value": 7.0}, "path": "it's a/odd, path=x.jsonl"},
        "seed": 3,
    }
    config = compose_config(to_overrides(settings))
    assert (config.scheduler.composition, config.cache.block_size, config.seed) == ("decode_first", 32, 3)
    assert (config.cache.watermark, config.cache.prefix_caching) == (None, False)
    assert config.raw["cost"] == {"name": "constant", "step_s": 0.25}
    assert config.raw["trace"]["prompt"]["value"] == 7.0
    assert config.trace.path == "it's a/odd, path=x.jsonl"


def test_backend_real_has_its_typed_options() -> None:
    config = compose_config(["backend=real", "backend.pace=as_fast_as_possible"])
    assert isinstance(config.backend, RealConfig)
    assert config.is_real
    assert config.backend.pace == "as_fast_as_possible"


def test_a_configuration_survives_its_file() -> None:
    raw = compose_config(["scheduler.kv_rules.allocate=chunk", "trace.turn_prompt={kind: constant, value: 9}"]).raw
    again = RunConfig.from_container(yaml.safe_load(yaml.safe_dump(raw)))
    assert again.raw == raw
    assert again == RunConfig.from_container(raw)


# --- slips of the pen: one line that names the place and the nearest valid name ---

SLIPS = [
    ("cache.blok_size=4", ["cache.blok_size", "cache.block_size"]),
    ("cache.watermrak=0.1", ["cache.watermrak", "cache.watermark"]),
    ("shceduler=unified", ["shceduler", "scheduler"]),
    ("sede=1", ["sede", "seed"]),
    ("scheduler=vllm_v2", ["vllm_v2", "vllm_v1"]),
    ("scheduler=prefil_first", ["prefil_first", "prefill_first"]),
    ("model=qwen3_8", ["qwen3_8", "qwen3_8b"]),
    ("device=h1000", ["h1000", "h100"]),
    ("cost=rofline", ["rofline", "roofline"]),
    ("trace=azzure", ["azzure", "azure"]),
    ("backend=reel", ["reel", "real"]),
    ("experiment=dmo", ["dmo", "demo"]),
    ("scheduler.queue_order=fcsf", ["scheduler.queue_order", "fcsf", "fcfs"]),
    ("scheduler.composition=unifed", ["scheduler.composition", "unifed", "unified"]),
    ("scheduler.victim=most_recent", ["scheduler.victim", "most_recently_admitted"]),
    ("cache.eviction=lur", ["cache.eviction", "lur", "lru"]),
    ("scheduler.preemption=recomptue", ["scheduler.preemption", "recomptue", "recompute"]),
    ("scheduler.kv_rules.allocate=hole", ["allocate", "hole", "whole"]),
    ("scheduler.kv_rules.hits_visble=commit", ["hits_visble", "hits_visible"]),
    ("trace.arival=poisson", ["trace.arival", "trace.arrival"]),
    ("trace.arrival=poison", ["arrival", "poison", "poisson"]),
    ("trace.prompt.kind=lognorml", ["kind", "lognorml", "lognormal"]),
    ("trace.prompt.vale=3", ["vale", "value"]),
    ("model.dtype=float33", ["model.dtype", "float33", "float32"]),
    ("cache.block_size", ["cache.block_size", "="]),
    ("=3", ["=3"]),
    ("trace.prompt={kind: ", ["trace.prompt"]),
    ("+cache.extra=1", ["cache.extra"]),
    ("+scheduler.kv_rules.foo=1", ["kv_rules", "foo"]),
    ("+extra.key=1", ["extra"]),
    ("model=3", ["model=3"]),
    ("seed=1,2", ["seed=1,2", "-m"]),
]


@pytest.mark.parametrize(("slip", "named"), SLIPS, ids=[slip for slip, _ in SLIPS])
def test_a_slip_of_the_pen_is_one_line_with_the_nearest_name(here: Path, say: Say, slip: str, named: list[str]) -> None:
    error = say("run", slip, "hydra.run.dir=run").error()
    for name in named:
        assert name in error
    assert not (here / "run" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("slip", "named"),
    [("backend.pace=fast", "as_fast_as_possible"), ("backend.device=gpu", "cuda"), ("backend.attention=flsh", "torch")],
)
def test_options_of_the_engine_too(tmp_path: Path, say: Say, slip: str, named: str) -> None:
    error = say("run", "backend=real", slip, f"hydra.run.dir={tmp_path / 'run'}").error()
    assert slip.partition("=")[0] in error
    assert named in error


RANGES = [
    "cache.block_size=0", "report.warmup_s=1.0e+18", "record.status_s=1.0e+300", "cache.block_size=513",
    "cache.num_gpu_blocks=0", "cache.num_cpu_blocks=-1", "cache.gpu_memory_utilization=1.5",
    "cache.gpu_memory_utilization=0", "cache.watermark=1", "cache.swap_space_gib=-1", "cache.swap_space_gib=.nan",
    "scheduler.max_num_seqs=0", "scheduler.max_num_batched_tokens=0", "scheduler.max_model_len=0",
    "scheduler.max_model_len=1000000", "scheduler.max_num_partial_prefills=0",
    "scheduler.long_prefill_token_threshold=-1", "scheduler.long_prefill_token_threshold=4096",
    "scheduler.watermark=-0.1", "trace.limit=0", "trace.num_requests=0", "trace.rate=0", "trace.rate=-2",
    "trace.rate=.nan", "trace.rate_scale=0", "trace.rate_scale=.nan", "trace.start_s=-1", "trace.end_s=0",
    "trace.max_prompt_tokens=0", "trace.vocab_size=0", "trace.vocab_size=99999999", "trace.cv=0",
    "trace.prompt.value=0", "trace.prompt.min_tokens=0", "model.hidden_size=0", "model.num_key_value_heads=3",
    "device.tensor_parallel_size=0", "device.memory_bytes=0", "sampling.temperature=-1", "sampling.max_tokens=0",
    "seed=-1", "seed=9223372036854775808", "trace.seed=9223372036854775808",
]  # fmt: skip


@pytest.mark.parametrize("override", RANGES)
def test_a_value_out_of_range_is_refused_before_anything_runs(tmp_path: Path, override: str) -> None:
    key, _, value = override.partition("=")
    with pytest.raises(TestbedError) as refused:
        execute(config_of((), **{key.replace(".", "__"): yaml.safe_load(value)}), tmp_path / "run")
    assert key.rpartition(".")[2] in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_misspelt_command_names_the_nearest(say: Say) -> None:
    assert "'run'" in say("rum").error()


def test_a_group_that_python_does_not_know_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'scheduler'"):
        simulate([{"arrival_time": 0, "prompt_tokens": 2, "output_tokens": 1}], schedular="unified")


def test_a_checkpoint_has_the_name_of_its_folder(tmp_path: Path) -> None:
    """And not of the option that it was laid over: a report would speak of another model."""
    shape = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "vocab_size": 512}  # fmt: skip
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    for path in (folder, folder / "config.json"):
        assert compose_config([f"model.path={path}"]).model.name == "my-llama"


RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def drawn(*overrides: str) -> tuple[float, ...]:
    sampling = compose_config(["sampling=recommended", *overrides]).sampling
    return tuple(getattr(sampling, name) for name in RECOMMENDED)


def test_recommended_sampling_is_the_model_s() -> None:
    assert drawn("model=qwen2.5_7b") == (0.7, 0.8, 20, 0.0, 1.05)
    assert drawn("model=llama3.1_8b", "sampling.top_p=0.5") == (0.6, 0.5, 0, 0.0, 1.0)
    assert drawn("model=mistral_7b_v0.3") == (1.0, 1.0, 0, 0.0, 1.0), "nothing is known of it: as vLLM"
    assert drawn("model=qwen3_8b", "model.recommended.top_k=5") == (0.6, 0.95, 5, 0.0, 1.0)


def test_recommended_sampling_of_a_checkpoint_is_its_own(tmp_path: Path) -> None:
    shape = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "vocab_size": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    file, path = tmp_path / "generation_config.json", f"model.path={tmp_path}"
    assert drawn("model=qwen3_8b", path) == (1.0, 1.0, 0, 0.0, 1.0), "not the library's model"
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.3, "top_k": 7, "eos_token_id": 2}))
    assert drawn(path) == drawn(f"{path}/config.json") == (0.3, 1.0, 7, 0.0, 1.0)
    for text, said in (
        ("[]", f"{file} is not a JSON object"),
        ("{", f"{file} is not JSON: "),
        ('{"top_p": "much"}', f"{file}: 'top_p' is 'much'; it must be a finite number"),
        ('{"top_k": 20.5}', f"{file}: 'top_k' is 20.5; it must be a whole number"),
        ('{"temperature": true}', f"{file}: 'temperature' is true; it must be a finite number"),
        ('{"temperature": Infinity}', f"{file}: 'temperature' is inf; it must be a finite number"),
        ('{"top_p": 7}', f"{file}: top_p is 7; it must be above 0 and at most 1"),
    ):
        file.write_text(text)
        with pytest.raises(TestbedError) as caught:
            compose_config(["sampling=recommended", path])
        assert str(caught.value).startswith(said)
    file.unlink()
    for make in (file.mkdir, lambda: file.symlink_to(tmp_path / "gone")):
        make()
        with pytest.raises(TestbedError, match=f"^{file} cannot be read: "):
            compose_config(["sampling=recommended", path])
        file.rmdir() if file.is_dir() else file.unlink()


def test_what_is_recommended_has_the_ranges_of_sampling() -> None:
    for name, value in (("temperature", -1), ("top_p", 7), ("top_k", -2), ("min_p", 1.5), ("repetition_penalty", 0)):
        with pytest.raises(ConfigError, match=rf"model\.recommended\.{name} is {value}.*; it must be "):
            compose_config([f"model.recommended.{name}={value}"])


def test_what_a_resolver_cannot_do_is_said_of_its_key() -> None:
    with pytest.raises(ConfigError, match=r"slo\.ttft_s: .*NO_SUCH_VARIABLE"):
        compose_config(["slo.ttft_s=${oc.env:NO_SUCH_VARIABLE}"])


def test_a_generated_trace_reads_no_file(tmp_path: Path, say: Say) -> None:
    said = say("run", "trace.path=conv.csv", f"hydra.run.dir={tmp_path / 'run'}")
    assert (said.status, "trace=synthetic reads no file; say what the file is, as trace=azure" in said.err) == (1, True)


@pytest.mark.parametrize("name", ["l40s", "rtx4090", "rtx_pro_6000", "rtx_pro_6000_server", "t4"])
def test_a_card_without_nvlink_gets_no_rate_of_another_s(name):
    with pytest.raises(ConfigError, match=rf"^device\.interconnect=nvlink, and {name} has none: choose pcie_p2p"):
        compose_config([f"device={name}", "device.interconnect=nvlink"])
    given = compose_config([f"device={name}", "device.interconnect=nvlink", "device.interconnect_bytes_per_s=3e10"])
    assert given.device.interconnect_bytes_per_s == 3e10


def test_kv_memory_of_a_cpu_may_be_large():
    assert compose_config(["backend=real", "backend.cpu_kv_bytes=4294967296"]).backend.cpu_kv_bytes == 2**32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("scheduler.queue_order={_target_: testbed.policies.orders.feedback.MultiLevelFeedbackQueue, num_levels: 65}",
         "num_levels is 65; it must be from 1 to 64"),
        ("scheduler.queue_order={_target_: testbed.policies.orders.response_ratio.HighestResponseRatioNext, "
         "classes_per_doubling: 1025}", "classes_per_doubling is 1025; it must be from 1 to 1,024"),
    ],
)  # fmt: skip
def test_numbers_that_would_make_an_order_endless_are_refused(given, message):
    config = compose_config([given])
    with pytest.raises(ConfigError, match=message):
        build_scheduler(config, simulated_pools(config))
