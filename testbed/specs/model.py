"""Models as numbers: shape, widths of their types, counts of parameters and bytes. Pure data, no framework.

Knows no device: memory.py computes what fits into one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from testbed.checks import choose, require, require_whole, require_whole_or_null
from testbed.core.sampling import SamplingParams
from testbed.errors import ConfigError, RequestError
from testbed.specs.ranges import FACTOR, MAX_SIZE

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
KV_DTYPE_BYTES = {**DTYPE_BYTES, "fp8_e4m3": 1, "fp8_e5m2": 1}
_OPT = "OPTForCausalLM"
EXPERTS_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary positions are extended beyond the model's first training length. Has no effect on step times.

    The field names are those of a Hugging Face `config.json`; `linear`, `dynamic`, `yarn` and `llama3` each use some of
    them. original_max_position_embeddings: None: the model's max_position_embeddings. attention_factor: factor of
    cosines and sines; None: it is computed (yarn).
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
            require(f"model.rope_scaling.{field.name}", value, FACTOR.holds(value), FACTOR.text)


@dataclass(frozen=True, slots=True)
class Recommended:
    """Sampling parameters for requests that give none, as in vLLM since 0.8: those of the checkpoint's
    `generation_config.json`, under its key names. Keys that are not known have vLLM's own defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        try:
            SamplingParams(**asdict(self))
        except RequestError as error:
            raise ConfigError(str(error).replace("sampling.", "model.recommended.", 1)) from None


class ExpertsShape(NamedTuple):
    """The experts of one layer."""

    num: int
    per_token: int
    inner_size: int  # of one expert


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only transformer. `path`: a local checkpoint or config.json to take the shape from.

    The field names are those of a Hugging Face `config.json`. dtype: of the weights; `fp8` applies only to the layers'
    projections (as in published FP8 checkpoints), and embeddings, activations and KV cache stay at 2 bytes.
    sliding_window: with which the model was trained; null: none. word_embed_proj_dim: width of the embedding if it is
    not hidden_size (only OPT-350m). attention_bias, mlp_bias: whether the projections of a layer add a bias (Qwen2
    ignores these: its q, k and v always add one, its others never). hidden_act: between the MLP's projections.
    do_layer_norm_before: only for OPT (false for 350m). num_experts: in every layer, instead of an MLP of
    intermediate_size, which then has no weights; null: no experts. Each token goes to num_experts_per_tok experts, each
    of moe_intermediate_size. norm_topk_prob: whether a token's expert weights are normalised to a sum of 1.
    recommended: the parameters of `sampling=recommended`; with a `path`, those of its own file count instead.
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
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    recommended: Recommended = Recommended()
    path: str | None = None

    def __post_init__(self) -> None:
        require("model.name", self.name, isinstance(self.name, str) and bool(self.name), "a name")
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
            require_whole(f"model.{field}", getattr(self, field), 1, MAX_SIZE)
        for field in ("sliding_window", "word_embed_proj_dim", *EXPERTS_FIELDS):
            require_whole_or_null(f"model.{field}", getattr(self, field), 1, MAX_SIZE)
        for field in ("rms_norm_eps", "rope_theta"):
            require(f"model.{field}", getattr(self, field), FACTOR.holds(getattr(self, field)), FACTOR.text)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"model.num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        missing = [field for field in EXPERTS_FIELDS if getattr(self, field) is None]
        if 0 < len(missing) < len(EXPERTS_FIELDS):
            raise ConfigError(f"model.{missing[0]} is null; set all of {', '.join(EXPERTS_FIELDS)}, or none of them")
        if (experts := self.experts) is not None and experts.per_token > experts.num:
            raise ConfigError(
                f"model.num_experts_per_tok ({self.num_experts_per_tok}) must be at most num_experts "
                f"({self.num_experts})"
            )
        choose("model.dtype", self.dtype, DTYPE_BYTES)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a weight of a layer's projections."""
        return DTYPE_BYTES[self.dtype]

    @property
    def activation_dtype_bytes(self) -> int:
        """Bytes of an element of activations, of embeddings, and of K and V unless `cache.kv_dtype` is set."""
        return max(2, self.dtype_bytes)

    @property
    def embedding_size(self) -> int:
        return self.word_embed_proj_dim or self.hidden_size

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence for which the model has positions, extended by its rope scaling."""
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
        """3: gate, up and down; 2 for OPT, which has no gate."""
        return 2 if self.architecture == _OPT else 3

    @property
    def has_rotary(self) -> bool:
        """Whether q and k are rotated by position. OPT adds learned positions to the embedding."""
        return self.architecture != _OPT

    @property
    def has_qk_norm(self) -> bool:
        """Whether each head of q and k is normalised."""
        return self.architecture.startswith("Qwen3")

    @property
    def attention_biases(self) -> tuple[bool, bool]:
        """Whether the projections of q, k and v add a bias, and whether that of the output does."""
        is_qwen2 = self.architecture == "Qwen2ForCausalLM"
        return (True, False) if is_qwen2 else (self.attention_bias, self.attention_bias)

    @property
    def experts(self) -> ExpertsShape | None:
        """The experts of each layer; None: each layer has one MLP for all tokens."""
        num, per_token, inner_size = self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size
        if num is None or per_token is None or inner_size is None:
            return None
        return ExpertsShape(num, per_token, inner_size)

    @property
    def inner_size(self) -> int:
        """Elements of a token between the MLP's projections, summed over the token's experts."""
        experts = self.experts
        return self.intermediate_size if experts is None else experts.per_token * experts.inner_size

    @property
    def num_router_parameters(self) -> int:
        """Parameters of a layer's router, which chooses experts."""
        return self.hidden_size * (self.num_experts or 0)

    @property
    def num_mlp_parameters(self) -> int:
        """Parameters of one layer's gate, up and down projections, or those of all experts and the router."""
        experts = self.experts
        inner_size = self.intermediate_size if experts is None else experts.num * experts.inner_size
        return self.num_mlp_matrices * self.hidden_size * inner_size + self.num_router_parameters

    @property
    def num_active_mlp_parameters(self) -> int:
        """Those of num_mlp_parameters that one token uses."""
        return self.num_mlp_matrices * self.hidden_size * self.inner_size + self.num_router_parameters

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of token embedding and LM head (one matrix if tied), and of OPT's positions and projections."""
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
        """Returns the KV heads on one rank. With more ranks than KV heads, each head is on several ranks."""
        return max(1, self.num_key_value_heads // tensor_parallel_size)

    def weight_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Returns the bytes of the weights on one rank; on the largest if sizes do not divide evenly."""
        size = tensor_parallel_size
        q_size = self.num_attention_heads * self.head_dim // size
        kv_size = self.num_kv_heads_per_rank(size) * self.head_dim
        mlp, router = self.num_mlp_parameters - self.num_router_parameters, self.num_router_parameters
        layer = self.hidden_size * (2 * q_size + 2 * kv_size) + -(-mlp // size)
        wide = -(-self.num_embedding_parameters // size) + self.num_hidden_layers * router  # routers: on every rank
        return self.num_hidden_layers * layer * self.dtype_bytes + wide * self.activation_dtype_bytes

    def kv_bytes_per_token(self, kv_dtype: str | None = None, tensor_parallel_size: int = 1) -> int:
        """Returns the bytes of one token's K and V over all layers, on one rank. kv_dtype: None: the model's."""
        width = self.activation_dtype_bytes if kv_dtype is None else KV_DTYPE_BYTES[kv_dtype]
        return 2 * self.num_hidden_layers * self.num_kv_heads_per_rank(tensor_parallel_size) * self.head_dim * width


def check_ranks(model: ModelSpec, tensor_parallel_size: int) -> None:
    """Raises ConfigError if the model's heads cannot be divided among the ranks, as engines require."""
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
