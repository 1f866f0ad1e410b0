"""Models and devices as numbers, and the memory arithmetic that both backends share. Pure data, no framework."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.errors import ConfigError, DeviceError, ModelError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only transformer. `path`: a local checkpoint or config.json to take the shape from.

    The field names are those of a Hugging Face `config.json`.
    """

    name: str
    architecture: str = "Qwen3ForCausalLM"
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    max_position_embeddings: int = 40960
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    dtype: str = "bfloat16"
    eos_token_id: int | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        for field in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        ):
            if getattr(self, field) < 1:
                raise ConfigError(f"model.{field} is {getattr(self, field)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"model.num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"model.dtype is {self.dtype!r}; choose one of {', '.join(DTYPE_BYTES)}")

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_attention_parameters(self) -> int:
        """Parameters of one layer's q, k, v and output projections."""
        q_size = self.num_attention_heads * self.head_dim
        kv_size = self.num_key_value_heads * self.head_dim
        return self.hidden_size * (q_size + 2 * kv_size) + q_size * self.hidden_size

    @property
    def num_mlp_parameters(self) -> int:
        """Parameters of one layer's gate, up and down projections (OPT has no gate)."""
        num_matrices = 2 if self.architecture == "OPTForCausalLM" else 3
        return num_matrices * self.hidden_size * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """All weights that lie on the device; norms are left out (below 0.1 %)."""
        layers = self.num_hidden_layers * (self.num_attention_parameters + self.num_mlp_parameters)
        return layers + self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token keeps over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """An accelerator (or a CPU) by its data sheet: dense rates without sparsity, in SI units."""

    name: str
    kind: str = "cuda"  # cuda, cpu
    memory_bytes: int = 80 * 10**9
    memory_bytes_per_s: float = 3.35e12
    flops_per_s: float = 989e12  # dense, at 2-byte precision
    interconnect_bytes_per_s: float = 450e9  # one direction, between devices
    interconnect_latency_ns: int = 5_000
    host_link_bytes_per_s: float = 55e9  # PCIe, one direction, as measured rather than nominal
    host_link_latency_ns: int = 10_000
    compute_efficiency: float = 0.7  # share of flops_per_s that large matrix products reach
    memory_efficiency: float = 0.85  # share of memory_bytes_per_s that streaming kernels reach
    step_overhead_ns: int = 500_000  # host work and launches of a step that the device waits for
    source: str = ""

    def __post_init__(self) -> None:
        for field in (
            "memory_bytes",
            "memory_bytes_per_s",
            "flops_per_s",
            "interconnect_bytes_per_s",
            "host_link_bytes_per_s",
            "compute_efficiency",
            "memory_efficiency",
        ):
            if not getattr(self, field) > 0:
                raise ConfigError(f"device.{field} is {getattr(self, field)}; it must be above 0")


def num_kv_blocks(
    *, memory_bytes: int, utilization: float, weight_bytes: int, activation_bytes: int, block_bytes: int
) -> int:
    """How many KV blocks fit: `(memory x utilization - weights - activations) // block`. Both backends ask here.

    Raises DeviceError if not even one fits.
    """
    usable = int(memory_bytes * utilization) - weight_bytes - activation_bytes
    num_blocks = usable // block_bytes
    if num_blocks < 1:
        raise DeviceError(
            f"no room for one KV block of {block_bytes:,} bytes: {memory_bytes:,} bytes x {utilization} utilization - "
            f"{weight_bytes:,} weights - {activation_bytes:,} activations = {usable:,}; "
            "raise cache.gpu_memory_utilization or choose a smaller model"
        )
    return int(num_blocks)


def activation_bytes(model: ModelSpec, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """The peak of a step's temporaries at the maximum load, estimated: hidden states, the MLP's inner row, logits."""
    per_token = 4 * model.hidden_size + 3 * model.intermediate_size
    return model.dtype_bytes * max_num_batched_tokens * per_token + 4 * max_num_seqs * model.vocab_size


_WHOLE_NUMBERS = (
    "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip


_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_KNOWN_ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "OPTForCausalLM")


def read_hf_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """A local Hugging Face `config.json` (or that of a folder) and what is in it.

    Raises ModelError if there is none, or it is no JSON object.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ModelError(f"no model at {path}: expected a folder with config.json, or that file")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ModelError(f"{file} is not JSON: not UTF-8 text; expected a Hugging Face config.json") from None
    except RecursionError:
        raise ModelError(f"{file} is not JSON: nested too deeply") from None
    except ValueError as error:  # also a number of too many digits
        raise ModelError(f"{file} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{file} holds no JSON object; expected a Hugging Face config.json")
    return file, raw


def load_hf_config(path: str | Path) -> dict[str, Any]:
    """The fields of a local Hugging Face `config.json` (or of the folder that has one) that ModelSpec knows.

    Raises ModelError if there is none, it is no JSON, a needed field is absent, or one has a value that cannot be.
    """
    file, raw = read_hf_config(path)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise ModelError(f"{file}: 'architectures' must name one architecture, found {architectures}")
    missing = [key for key in _NEEDED if raw.get(key) is None]
    if missing and architectures[0] in _KNOWN_ARCHITECTURES:
        raise ModelError(f"{file} lacks {', '.join(missing)}; expected the whole config.json of the model")
    if missing:
        raise ModelError(
            f"{file}: architecture {architectures[0]!r} is not supported: its config has no {', '.join(missing)}; "
            f"choose a model that has them, as {', '.join(_KNOWN_ARCHITECTURES)} do"
        )
    for key in _WHOLE_NUMBERS:
        value = raw.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ModelError(f"{file}: {key!r} is {value!r}; it must be a whole number above 0")
    rope = raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{file}: 'rope_parameters' is {rope!r}; it must be an object")
    eos = raw.get("eos_token_id")
    eos = (eos[0] if eos else None) if isinstance(eos, list) else eos
    if eos is not None and (isinstance(eos, bool) or not isinstance(eos, int)):
        raise ModelError(f"{file}: 'eos_token_id' is {eos!r}; it must be a token id, a list of them, or null")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ModelError(f"{file}: 'dtype' is {dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    tied = raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ModelError(f"{file}: 'tie_word_embeddings' is {tied!r}; it must be true or false")
    return {
        "architecture": architectures[0],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw.get("intermediate_size") or raw.get("ffn_dim") or 4 * raw["hidden_size"],
        "num_hidden_layers": raw["num_hidden_layers"],
        "num_attention_heads": raw["num_attention_heads"],
        "num_key_value_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        "vocab_size": raw["vocab_size"],
        "max_position_embeddings": raw.get("max_position_embeddings") or 2048,
        "tie_word_embeddings": tied,
        "rms_norm_eps": _positive(file, "rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        "rope_theta": _positive(file, "rope_theta", raw.get("rope_theta") or rope.get("rope_theta", 10_000.0)),
        "dtype": dtype,
        "eos_token_id": eos,
    }


def _positive(file: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{file}: {key!r} is {value!r}; it must be a finite number above 0")
    return value
