"""Models and devices as numbers, and the memory arithmetic that both backends share. Pure data, no framework."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from testbed.errors import ConfigError, DeviceError, ModelError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
KV_DTYPE_BYTES = {**DTYPE_BYTES, "fp8_e4m3": 1, "fp8_e5m2": 1}
DEVICE_KINDS = ("cuda", "cpu")
_OPT = "OPTForCausalLM"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only transformer. `path`: a local checkpoint or config.json to take the shape from.

    The field names are those of a Hugging Face `config.json`. dtype: of the weights; with `fp8` only the projections of
    the layers have it (as published FP8 checkpoints do), and embeddings, activations and KV cache stay at 2 bytes.
    sliding_window: what the model was trained to look back at; null: everything. word_embed_proj_dim: width of the
    embedding where it is not hidden_size (OPT-350m alone).
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
    sliding_window: int | None = None
    word_embed_proj_dim: int | None = None
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
        for field in ("sliding_window", "word_embed_proj_dim"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"model.{field} is {value}; it must be at least 1, or null")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"model.num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"model.dtype is {self.dtype!r}; choose one of {', '.join(DTYPE_BYTES)}")

    @property
    def dtype_bytes(self) -> int:
        """Of a weight of a layer's projections."""
        return DTYPE_BYTES[self.dtype]

    @property
    def activation_dtype_bytes(self) -> int:
        """Of activations, of embeddings, and of K and V unless the cache says otherwise."""
        return max(2, self.dtype_bytes)

    @property
    def embedding_size(self) -> int:
        return self.word_embed_proj_dim or self.hidden_size

    @property
    def num_attention_parameters(self) -> int:
        """Parameters of one layer's q, k, v and output projections."""
        q_size = self.num_attention_heads * self.head_dim
        kv_size = self.num_key_value_heads * self.head_dim
        return self.hidden_size * (q_size + 2 * kv_size) + q_size * self.hidden_size

    @property
    def num_mlp_matrices(self) -> int:
        """Gate, up and down; OPT has no gate."""
        return 2 if self.architecture == _OPT else 3

    @property
    def num_mlp_parameters(self) -> int:
        """Parameters of one layer's gate, up and down projections."""
        return self.num_mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def num_embedding_parameters(self) -> int:
        """Token embedding and LM head (one matrix where they are tied); OPT's learned positions and projections."""
        tokens = self.vocab_size * self.embedding_size * (1 if self.tie_word_embeddings else 2)
        projections = 2 * self.embedding_size * self.hidden_size if self.embedding_size != self.hidden_size else 0
        positions = (self.max_position_embeddings + 2) * self.hidden_size if self.architecture == _OPT else 0
        return tokens + projections + positions

    @property
    def num_parameters(self) -> int:
        """All weights; norms and biases are left out (below 0.1 %)."""
        layers = self.num_hidden_layers * (self.num_attention_parameters + self.num_mlp_parameters)
        return layers + self.num_embedding_parameters

    def num_kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        """Where there are more ranks than KV heads, each head lies on several ranks."""
        return max(1, self.num_key_value_heads // tensor_parallel_size)

    def weight_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Bytes of the weights on one rank, the largest where the vocabulary does not divide."""
        size = tensor_parallel_size
        q_size = self.num_attention_heads * self.head_dim // size
        kv_size = self.num_kv_heads_per_rank(size) * self.head_dim
        layer = self.hidden_size * (2 * q_size + 2 * kv_size) + -(-self.num_mlp_parameters // size)
        embeddings = -(-self.num_embedding_parameters // size)
        return self.num_hidden_layers * layer * self.dtype_bytes + embeddings * self.activation_dtype_bytes

    def kv_bytes_per_token(self, kv_dtype: str | None = None, tensor_parallel_size: int = 1) -> int:
        """Bytes of K and V that one token keeps over all layers, on one rank. kv_dtype: None is the model's."""
        width = self.activation_dtype_bytes if kv_dtype is None else KV_DTYPE_BYTES[kv_dtype]
        return 2 * self.num_hidden_layers * self.num_kv_heads_per_rank(tensor_parallel_size) * self.head_dim * width


def check_ranks(model: ModelSpec, tensor_parallel_size: int) -> None:
    """Raises ConfigError if the model's heads do not divide among the ranks, as engines want them to."""
    size, num_kv_heads = tensor_parallel_size, model.num_key_value_heads
    if size < 1 or model.num_attention_heads % size:
        raise ConfigError(
            f"device.tensor_parallel_size is {size}; it must divide the "
            f"{model.num_attention_heads} attention heads of model {model.name}"
        )
    if num_kv_heads % size and size % num_kv_heads:
        raise ConfigError(
            f"device.tensor_parallel_size is {size}; it must divide the {num_kv_heads} KV heads of model {model.name}, "
            "or be a multiple of them"
        )


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """An accelerator (or a CPU) by its data sheet: dense rates without sparsity, in SI units.

    path: a YAML file of your own with these fields; what it leaves out keeps the value of the chosen device.
    """

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
    path: str | None = None

    def __post_init__(self) -> None:
        for field, expected in DEVICE_FIELDS.items():
            value = getattr(self, field)
            if not expected.holds(value):
                raise ConfigError(f"device.{field} is {value!r}; it must be {expected.text}")


class Expected(NamedTuple):
    """What a value of a field must be."""

    text: str
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_NAME = Expected("a name", lambda value: isinstance(value, str) and bool(value))
_RATE = Expected("a finite number above 0", lambda value: _is_number(value) and value > 0)
_SHARE = Expected("a share above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1)
_NS = Expected("a whole number of ns, at least 0", lambda value: _is_whole(value) and value >= 0)

DEVICE_FIELDS: dict[str, Expected] = {
    "name": _NAME,
    "kind": Expected("one of " + ", ".join(DEVICE_KINDS), lambda value: value in DEVICE_KINDS),
    "memory_bytes": Expected("a whole number of bytes above 0", lambda value: _is_whole(value) and value > 0),
    "memory_bytes_per_s": _RATE,
    "flops_per_s": _RATE,
    "interconnect_bytes_per_s": _RATE,
    "interconnect_latency_ns": _NS,
    "host_link_bytes_per_s": _RATE,
    "host_link_latency_ns": _NS,
    "compute_efficiency": _SHARE,
    "memory_efficiency": _SHARE,
    "step_overhead_ns": _NS,
    "source": Expected("a text", lambda value: isinstance(value, str)),
}


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
            "raise cache.gpu_memory_utilization or device.tensor_parallel_size, or choose a smaller model"
        )
    return int(num_blocks)


def activation_bytes(model: ModelSpec, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """The peak of a step's temporaries at the maximum load, estimated: hidden states, the MLP's inner row, logits."""
    per_token = 4 * model.hidden_size + 3 * model.intermediate_size
    return model.activation_dtype_bytes * max_num_batched_tokens * per_token + 4 * max_num_seqs * model.vocab_size


_WHOLE_NUMBERS = (
    "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "word_embed_proj_dim",
)  # fmt: skip


_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_KNOWN_ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", _OPT)


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
    tied = raw.get("tie_word_embeddings", architectures[0] == _OPT)  # as transformers has it where the file is silent
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
        "sliding_window": raw.get("sliding_window") if architectures[0] == "MistralForCausalLM" else None,
        "word_embed_proj_dim": raw.get("word_embed_proj_dim"),
    }


def _positive(file: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{file}: {key!r} is {value!r}; it must be a finite number above 0")
    return value
