"""A random model small enough for a CPU, and what stock vLLM says with it."""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
IS_NEWER = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"  # the model runner that vLLM takes by itself on GPUs


def _why_left_out() -> str:
    """What keeps these tests from running in this environment; empty: nothing."""
    if find_spec("vllm") is None:
        return "vLLM is not in this environment: make test-vllm"
    if not IS_NEWER:
        return ""
    # its kernels are Triton's, for which vLLM asks for a CPU backend: Triton's interpreter stands for one
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        backends = import_module("triton.backends").backends
    except ModuleNotFoundError:
        return "vLLM's newer model runner needs Triton, which is not in this environment"
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    if not import_module("vllm.triton_utils").HAS_TRITON:
        return "this vLLM takes no other backend of Triton for a CPU's"
    return ""


LEFT_OUT = _why_left_out()


class _LeftOut(pytest.Item):
    """Stands for the tests of a module that is not imported. Were nothing collected, pytest would call that a failure,
    and a skip from a conftest.py that the command line leads to ends it with a traceback."""

    def runtest(self) -> None:
        pytest.skip(LEFT_OUT)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class _LeftOutModule(pytest.Module):
    def collect(self) -> list[pytest.Item | pytest.Collector]:
        item = _LeftOut.from_parent(self, name="left_out")
        item.add_marker(pytest.mark.vllm)
        return [item]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _LeftOutModule.from_parent(parent, path=module_path) if LEFT_OUT else None


VOCAB_SIZE = 1024
BLOCK_SIZE = 32
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 32, "hidden_act": "silu", "hidden_size": 128, "initializer_range": 0.5, "intermediate_size": 256,
    "max_position_embeddings": 2048, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "float32", "use_sliding_window": False, "vocab_size": VOCAB_SIZE,
}  # fmt: skip
OPTIONS = {
    "skip_tokenizer_init": True, "enforce_eager": True, "block_size": BLOCK_SIZE, "max_num_seqs": 16,
    "max_num_batched_tokens": 256, "max_model_len": 512, "dtype": "float32",
}  # fmt: skip


@contextmanager
def no_veto() -> Iterator[None]:
    """vLLM's CPU platform turns asynchronous scheduling off; with its veto lifted it runs."""
    from vllm.platforms import cpu

    own = cpu.CpuPlatform.__dict__["check_and_update_config"]

    def check(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        own.__func__(cls, config)
        config.scheduler_config.async_scheduling = wanted

    cpu.CpuPlatform.check_and_update_config = classmethod(check)
    try:
        yield
    finally:
        cpu.CpuPlatform.check_and_update_config = own


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that stand in a file: each engine that is started has the same."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    set_seed(7)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Pairs of twins, of which every other pair shares its beginning with others."""
    rng = random.Random(11)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(96)]
    made = []
    for number in range(24):
        prompt = shared[: rng.choice((0, 64, 96))] + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(5, 90))]
        if number % 4 == 0:
            prompt = prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE] or prompt
        made += [prompt, list(prompt)]
    return made


@pytest.fixture(scope="session")
def start(model: Path) -> Callable[..., Any]:
    def started(**options: Any) -> Any:
        import vllm

        gc.collect()
        return vllm.LLM(model=str(model), **{**OPTIONS, **options})

    return started


@pytest.fixture(scope="session")
def num_tokens(prompts: list[list[int]]) -> list[int]:
    rng = random.Random(12)
    return [rng.randrange(20, 60) for _ in prompts]


@pytest.fixture(scope="session")
def stock(start: Callable[..., Any], prompts: list[list[int]], num_tokens: list[int]) -> list[list[int]]:
    """What vLLM's own scheduler gives in a roomy pool."""
    import vllm

    llm = start(num_gpu_blocks_override=600)
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, detokenize=False) for num in num_tokens
    ]
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    outputs = [list(one.outputs[0].token_ids) for one in found]
    llm.llm_engine.engine_core.shutdown()
    return outputs
