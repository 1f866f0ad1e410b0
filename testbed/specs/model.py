"""Models and devices as numbers, and the memory arithmetic that both backends share. Pure data, no framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from testbed.errors import ConfigError, DeviceError
from testbed.foreign_text import number, shown, whole

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
KV_DTYPE_BYTES = {**DTYPE_BYTES, "fp8_e4m3": 1, "fp8_e5m2": 1}
DEVICE_KINDS = ("cuda", "cpu")
MAX_SIZE = 2**31 - 1  # of a dimension of a model, in elements, layers, tokens: products of a few are finite prices
MAX_PART_NS = 10**15  # of a time that is given, 11 days: what a step multiplies it by leaves it finite
_OPT = "OPTForCausalLM"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary positions reach beyond the length that a model was first trained on; costs nothing.

    The field names are those of a Hugging Face `config.json`, where `linear`, `dynamic`, `yarn` and `llama3` each read
    some of them. original_max_position_embeddings: None is the model's max_position_embeddings. attention_factor: what
    cosines and sines are multiplied by; None computes it (yarn).
    """

    rope_type: str
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("rope_type", "truncate") or value is None:
                continue
            if not FACTOR.holds(value):
                raise ConfigError(f"model.rope_scaling.{field.name} is {shown(value)}; it must be {FACTOR.text}")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only transformer. `path`: a local checkpoint or config.json to take the shape from.

    The field names are those of a Hugging Face `config.json`. dtype: of the weights; with `fp8` only the projections of
    the layers have it (as published FP8 checkpoints do), and embeddings, activations and KV cache stay at 2 bytes.
    sliding_window: what the model was trained to look back at; null: everything. word_embed_proj_dim: width of the
    embedding where it is not hidden_size (OPT-350m alone). attention_bias, mlp_bias: whether the projections of a layer
    add one. hidden_act: between the feed-forward's projections. do_layer_norm_before: OPT alone (350m has it after).
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
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    do_layer_norm_before: bool = True
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
            if not 1 <= getattr(self, field) <= MAX_SIZE:
                raise ConfigError(f"model.{field} is {shown(getattr(self, field))}; it must be from 1 to {MAX_SIZE:,}")
        for field in ("sliding_window", "word_embed_proj_dim"):
            value = getattr(self, field)
            if value is not None and not 1 <= value <= MAX_SIZE:
                raise ConfigError(f"model.{field} is {shown(value)}; it must be from 1 to {MAX_SIZE:,}, or null")
        for field in ("rms_norm_eps", "rope_theta"):
            if not FACTOR.holds(getattr(self, field)):
                raise ConfigError(f"model.{field} is {shown(getattr(self, field))}; it must be {FACTOR.text}")
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
    def max_length(self) -> int:
        """Tokens of the longest sequence that the model's positions are made for, stretched by its rope scaling."""
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type not in ("linear", "dynamic", "yarn"):
            return self.max_position_embeddings
        return int((scaling.original_max_position_embeddings or self.max_position_embeddings) * scaling.factor)

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
                raise ConfigError(f"device.{field} is {shown(value)}; it must be {expected.text}")


class Expected(NamedTuple):
    """What a value of a field must be."""

    text: str
    holds: Callable[[Any], bool]


_NAME = Expected("a name", lambda value: isinstance(value, str) and bool(value))
FACTOR = Expected("a number above 0, at most 1e12", lambda value: number(0, 1e12)(value) and value > 0)
_RATE = Expected("a number from 1 to 1e30", number(1, 1e30))  # per second: what is divided by it stays finite
_SHARE = Expected("a share from 1e-6 to 1", number(1e-6, 1))
_NS = Expected(f"a whole number of ns, from 0 to {MAX_PART_NS:,}", whole(0, MAX_PART_NS))

DEVICE_FIELDS: dict[str, Expected] = {
    "name": _NAME,
    "kind": Expected("one of " + ", ".join(DEVICE_KINDS), lambda value: value in DEVICE_KINDS),
    "memory_bytes": Expected("a whole number of bytes, from 1 to 1e18", whole(1, 10**18)),
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
    *,
    memory_bytes: int,
    utilization: float,
    weight_bytes: int,
    activation_bytes: int,
    block_bytes: int,
    graph_bytes: int = 0,
) -> int:
    """How many KV blocks fit: `(memory x utilization - weights - activations - graphs) // block`. Both backends ask
    here.

    graph_bytes: of captured decodes; 0: none are captured. Raises DeviceError if not even one fits.
    """
    usable = int(memory_bytes * utilization) - weight_bytes - activation_bytes - graph_bytes
    num_blocks = usable // block_bytes
    if num_blocks < 1:
        raise DeviceError(
            f"no room for one KV block of {block_bytes:,} bytes: {memory_bytes:,} bytes x {utilization} utilization - "
            f"{weight_bytes:,} weights - {activation_bytes:,} activations - {graph_bytes:,} captured graphs = "
            f"{usable:,}; "
            "raise cache.gpu_memory_utilization or device.tensor_parallel_size, or choose a smaller model"
        )
    return int(num_blocks)


def activation_bytes(
    model: ModelSpec, max_num_batched_tokens: int, max_num_seqs: int, tensor_parallel_size: int = 1
) -> int:
    """The peak of a step's temporaries on one rank at the maximum load, estimated: hidden states, the MLP's inner row,
    logits.

    Hidden states are whole on every rank, and so are the logits once they are gathered; the inner row is shared out.
    """
    per_token = 4 * model.hidden_size + 3 * _inner_size(model, tensor_parallel_size)
    return model.activation_dtype_bytes * max_num_batched_tokens * per_token + 4 * max_num_seqs * model.vocab_size


def graph_bytes(model: ModelSpec, largest: int, tensor_parallel_size: int = 1) -> int:
    """What captured decodes of up to `largest` rows hold on one rank, estimated: the temporaries of the largest, in
    which the smaller ones work too, and their result.

    What the driver keeps of each graph, which an engine measures, is left out: no data sheet says it.
    """
    per_token = 5 * model.hidden_size + 3 * _inner_size(model, tensor_parallel_size)
    return model.activation_dtype_bytes * largest * per_token


def _inner_size(model: ModelSpec, tensor_parallel_size: int) -> int:
    """One rank's part of the MLP's inner row."""
    return -(-model.intermediate_size // tensor_parallel_size)
