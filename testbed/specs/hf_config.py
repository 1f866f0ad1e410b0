"""Reads a Hugging Face `config.json` as fields of ModelSpec, and sampling parameters from its `generation_config.json`.

Pure data: no framework, and no weights.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from testbed.checks import require
from testbed.errors import ConfigError, ModelError
from testbed.foreign_text import json_object, shown, whole
from testbed.specs.model import DTYPE_BYTES, EXPERTS_FIELDS, ModelSpec, Recommended, RopeScaling
from testbed.specs.quantization import Fp8Scheme, fp8_scheme
from testbed.specs.ranges import FACTOR, MAX_SIZE, Expected

GENERATION_FILE = "generation_config.json"
SAMPLING_DEFAULTS: dict[str, float] = asdict(Recommended())  # vLLM's default of each key that is read
_SIZES = (
    "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "word_embed_proj_dim", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
_FLAGS = (
    "attention_bias", "mlp_bias", "enable_bias", "do_layer_norm_before", "use_sliding_window", "norm_topk_prob",
    "tie_word_embeddings",
)  # fmt: skip
_NAME = Expected("the name of an activation", lambda value: isinstance(value, str))
_EXPECTED = {  # of a key that is not null
    **dict.fromkeys(_SIZES, Expected(f"a whole number from 1 to {MAX_SIZE:,}", whole(1, MAX_SIZE))),
    **dict.fromkeys(_FLAGS, Expected("true or false", lambda value: isinstance(value, bool))),
    "max_window_layers": Expected(f"a whole number from 0 to {MAX_SIZE:,}", whole(0, MAX_SIZE)),
    "hidden_act": _NAME, "activation_function": _NAME,
}  # fmt: skip
_KINDS = ("full_attention", "sliding_attention")  # of layers
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

_MOE, _MIXTRAL, _PHI3 = "Qwen3MoeForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"

# The defaults of transformers for keys that a file does not have; a null in the file is not replaced.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    _MOE: {
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "intermediate_size": 6144, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    },
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "LlamaForCausalLM": {"eos_token_id": 2},
    "MistralForCausalLM": {
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096, "eos_token_id": 2
    },
    _MIXTRAL: {
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "sliding_window": None, "eos_token_id": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    },
    _PHI3: {"max_position_embeddings": 4096, "sliding_window": None, "eos_token_id": 32000, "rms_norm_eps": 1e-5},
    "OPTForCausalLM": {"eos_token_id": 2, "activation_function": "relu"},
}  # fmt: skip
ARCHITECTURES = tuple(_DEFAULTS)  # whose operators are known
LIKE_LLAMA = (  # as many weights and as large a KV cache as a Llama of their sizes; their small operators differ
    "CohereForCausalLM", "Ernie4_5ForCausalLM", "GemmaForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM",
    "GraniteForCausalLM", "HeliumForCausalLM", "InternLM2ForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM",
    "SeedOssForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM",
)  # fmt: skip
_TIED = ("CohereForCausalLM", "Ernie4_5ForCausalLM", "GemmaForCausalLM", "OPTForCausalLM", "SmolLM3ForCausalLM")
_WINDOW_IF_ENABLED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", _MOE, "SmolLM3ForCausalLM")  # by use_sliding_window
_WINDOW_IN_ALL = (_MOE, _MIXTRAL, _PHI3)  # a window is in every layer
_OWN_BIASES = ("MistralForCausalLM", "Qwen2ForCausalLM")  # the architecture decides on biases, not a key
_SCALED = ("linear", "dynamic", "yarn", "llama3")


def read_hf_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Returns the path and the content of a local Hugging Face `config.json`. path: the file, or its folder.

    Raises ModelError if the file is missing or is not a JSON object.
    """
    file = _config_file(path)
    if not file.is_file():
        raise ModelError(f"no model at {path}: expected a folder with config.json, or that file")
    return file, _object(file, "; expected a Hugging Face config.json")


def _config_file(path: str | Path) -> Path:
    return Path(path, "config.json") if Path(path).is_dir() else Path(path)


def _object(file: Path, cure: str = "") -> dict[str, Any]:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from None
    return json_object(text, str(file), ModelError, cure)


def load_hf_config(path: str | Path) -> dict[str, Any]:
    """Returns the fields of ModelSpec that a local Hugging Face `config.json` gives. path: the file, or its folder.

    Reads the keys of transformers 4 (`rope_scaling`, `torch_dtype`) and of 5 (`rope_parameters`, `dtype`). Raises
    ModelError if the file is missing or not JSON, a needed field is absent, or a field has an impossible value.
    """
    file, raw = read_hf_config(path)
    architecture = _architecture(file, raw)
    raw = {**_DEFAULTS.get(architecture, {}), **raw}
    if "num_local_experts" in raw:  # as transformers 5 writes it
        raw["num_experts"] = raw["num_local_experts"]
    if architecture == _MIXTRAL:
        raw["moe_intermediate_size"] = raw["intermediate_size"]
    if raw.get("sliding_window") == 0 and raw.get("use_sliding_window") is False:
        raw["sliding_window"] = None  # as transformers writes a Qwen2-MoE's window that is off
    _check_values(file, architecture, raw)
    is_opt = architecture == "OPTForCausalLM"
    has_bias = raw.get("enable_bias", True) if is_opt else architecture not in _OWN_BIASES
    rope, embedding = _rope(file, architecture, raw), raw.get("word_embed_proj_dim")
    return {
        "architecture": architecture,
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw.get("intermediate_size") or raw.get("ffn_dim") or 4 * raw["hidden_size"],
        "num_hidden_layers": raw["num_hidden_layers"],
        "num_attention_heads": raw["num_attention_heads"],
        "num_key_value_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        "vocab_size": raw["vocab_size"],
        "max_position_embeddings": raw.get("max_position_embeddings") or 2048,
        "tie_word_embeddings": bool(_first(architecture in _TIED, raw.get("tie_word_embeddings"))),
        "rms_norm_eps": _positive(file, "rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        "rope_theta": _positive(file, "rope_theta", _first(10_000.0, rope.get("rope_theta"), raw.get("rope_theta"))),
        "dtype": _dtype(file, raw),
        "eos_token_id": _eos_token_id(file, raw),
        "sliding_window": _sliding_window(architecture, raw),
        "word_embed_proj_dim": None if embedding == raw["hidden_size"] else embedding,
        "rope_scaling": _rope_scaling(file, raw, rope),
        "attention_bias": has_bias and (is_opt or bool(raw.get("attention_bias"))),
        "mlp_bias": has_bias if is_opt else architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias")),
        "hidden_act": raw.get("activation_function" if is_opt else "hidden_act") or "silu",
        "do_layer_norm_before": bool(raw.get("do_layer_norm_before", True)),
        **(_experts(raw) if architecture in (_MOE, _MIXTRAL) else {}),
    }


def _experts(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model that has a mixture of experts in every layer."""
    return {name: raw[name] for name in EXPERTS_FIELDS} | {"norm_topk_prob": bool(raw["norm_topk_prob"])}


def _first(default: Any, *values: Any) -> Any:
    """Returns the first value that is not None, else the default."""
    return next((value for value in values if value is not None), default)


def _architecture(file: Path, raw: dict[str, Any]) -> str:
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise ModelError(f"{file}: 'architectures' must name one architecture, found {shown(architectures)}")
    missing = [key for key in _NEEDED if raw.get(key) is None]
    if missing and architectures[0] in _DEFAULTS:
        raise ModelError(f"{file} lacks {', '.join(missing)}; expected the whole config.json of the model")
    if missing:
        raise ModelError(
            f"{file}: architecture {architectures[0]!r} is not supported: its config has no {', '.join(missing)}; "
            f"choose a model that has them, as {', '.join(ARCHITECTURES)} do"
        )
    return architectures[0]


def _check_values(file: Path, architecture: str, raw: dict[str, Any]) -> None:
    for key, expected in _EXPECTED.items():
        value = raw.get(key)
        require(f"{file}: {key!r}", value, value is None or expected.holds(value), expected.text, ModelError)
    kinds, num = raw.get("layer_types"), raw["num_hidden_layers"]
    is_good = kinds is None or (isinstance(kinds, list) and len(kinds) == num and all(kind in _KINDS for kind in kinds))
    if architecture in ARCHITECTURES + LIKE_LLAMA:  # others have kinds of their own
        require(f"{file}: 'layer_types'", kinds, is_good, f"a list of {num}, each {' or '.join(_KINDS)}", ModelError)


def _dtype(file: Path, raw: dict[str, Any]) -> str:
    """Returns the dtype of the weights of the layers' projections."""
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    is_good = isinstance(dtype, str) and dtype in DTYPE_BYTES
    require(f"{file}: 'dtype'", dtype, is_good, f"one of {', '.join(DTYPE_BYTES)}", ModelError)
    return "fp8" if isinstance(fp8_scheme(raw), Fp8Scheme) else str(dtype)


def _eos_token_id(file: Path, raw: dict[str, Any]) -> int | None:
    """Returns the EOS token id; the first one of a list."""
    eos = raw.get("eos_token_id")
    eos = (eos[0] if eos else None) if isinstance(eos, list) else eos
    if eos is not None and (isinstance(eos, bool) or not isinstance(eos, int)):
        raise ModelError(f"{file}: 'eos_token_id' is {shown(eos)}; it must be a token id, a list of them, or null")
    return eos


def _sliding_window(architecture: str, raw: dict[str, Any]) -> int | None:
    """Returns the window of all layers; None if a layer has none."""
    return raw.get("sliding_window", 4096) if all(sliding_layers(architecture, raw)) else None


def sliding_layers(architecture: str, raw: dict[str, Any]) -> list[bool]:
    """Returns for each layer whether its attention has a window, as transformers reads the config.

    With `layer_types` a Mistral is read as a Ministral. A Qwen's config can have a window that it does not enable.
    Others, such as Llama, have no window, whatever the file says.
    """
    num, is_mistral, kinds = raw["num_hidden_layers"], architecture == "MistralForCausalLM", raw.get("layer_types")
    is_enabled = raw.get("use_sliding_window") if architecture in _WINDOW_IF_ENABLED else architecture in _WINDOW_IN_ALL
    if raw.get("sliding_window", 4096) is None or not (is_mistral or is_enabled):
        return [False] * num
    if architecture in _WINDOW_IN_ALL or (is_mistral and not kinds):
        return [True] * num
    if kinds:
        return [kind == "sliding_attention" for kind in kinds]
    return [layer >= _first(28, raw.get("max_window_layers")) for layer in range(num)]


def uneven_layers(architecture: str, raw: dict[str, Any]) -> list[str]:
    """Describes how the layers of a config.json differ from each other, where a ModelSpec has all layers alike."""
    sliding = sliding_layers(architecture, raw)
    uneven = {
        "sliding-window attention in some layers only": any(sliding) and not all(sliding),
        "experts in some layers only": bool(raw.get("mlp_only_layers")) or raw.get("decoder_sparse_step", 1) != 1,
    }
    return [option for option, is_so in uneven.items() if is_so]


def why_uncounted(spec: ModelSpec) -> str:
    """Returns why the weights, KV cache and operators of a model do not follow from the spec's fields; empty if they
    do."""
    if spec.architecture not in ARCHITECTURES + LIKE_LLAMA:
        return f"{spec.architecture} is none of {', '.join(ARCHITECTURES + LIKE_LLAMA)}"
    uneven = uneven_layers(spec.architecture, read_hf_config(spec.path)[1]) if spec.path else []
    return f"it has {' and '.join(uneven)}" if uneven else ""


def _rope(file: Path, architecture: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of rotary positions, under the key of transformers 4 or of 5; none if they differ by the
    kind of layer in an architecture that nothing here computes or counts. Raises ModelError."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key) or {}
        if not isinstance(rope, dict):
            raise ModelError(f"{file}: {key!r} is {shown(rope)}; it must be an object")
        if any(isinstance(value, dict) for value in rope.values()):
            if architecture not in ARCHITECTURES + LIKE_LLAMA:
                return {}
            raise ModelError(f"{file}: {key!r} differs by the kind of layer, which is not supported; use another model")
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def _rope_scaling(file: Path, raw: dict[str, Any], rope: dict[str, Any]) -> RopeScaling | None:
    """Returns None if positions are not scaled, and only the name of an unknown type."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type not in _SCALED:
        return RopeScaling(str(rope_type))
    values = dict(rope)
    if rope_type == "dynamic":  # transformers takes max_position_embeddings in any case
        values.pop("original_max_position_embeddings", None)
    elif raw.get("original_max_position_embeddings") is not None:
        values["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    original = values.get("original_max_position_embeddings")
    if rope_type == "yarn" and values.get("factor") is None and original:
        length = raw.get("max_position_embeddings") or 2048
        values["factor"] = length / _positive(file, "original_max_position_embeddings", original)
    needed = ("factor", "low_freq_factor", "high_freq_factor") if rope_type == "llama3" else ("factor",)
    for key in needed:
        if values.get(key) is None:
            raise ModelError(f"{file}: rope scaling {rope_type!r} lacks {key!r}")
    numbers = [item.name for item in fields(RopeScaling) if item.name not in ("rope_type", "truncate")]
    given: dict[str, Any] = {key: _positive(file, key, values[key]) for key in numbers if values.get(key) is not None}
    return RopeScaling(rope_type, truncate=bool(values.get("truncate", True)), **given)


def _positive(file: Path, key: str, value: object) -> float:
    require(f"{file}: {key!r}", value, FACTOR.holds(value), FACTOR.text, ModelError)
    assert isinstance(value, int | float)
    return value


# --- generation_config.json ---


def read_json_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; empty if the file is missing. Raises ModelError for a damaged file."""
    return _object(file) if file.exists() or file.is_symlink() else {}


def end_tokens(path: str | Path | None) -> tuple[int, ...]:
    """Returns every token that ends a text: those of config.json, then those of generation_config.json, each once.
    path: the folder or its config.json; None: returns none. Raises ModelError for a damaged file."""
    if path is None:
        return ()
    found: list[int] = []
    for file in (_config_file(path), folder_of(path) / GENERATION_FILE):
        value = read_json_object(file).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise ModelError(f"{file}: 'eos_token_id' is {shown(value)}; expected a token id, or a list of them")
        found += [token for token in ids if token >= 0]  # -1 stands for none
    return tuple(dict.fromkeys(found))


def folder_of(path: str | Path) -> Path:
    """Returns a checkpoint's folder. path: that folder or its config.json."""
    place = Path(path)
    return place if place.is_dir() else place.parent


def recommended(key: str, path: str | None, library: float) -> float:
    """Returns a sampling parameter from the checkpoint's generation_config.json, else vLLM's default. path: the folder
    or its config.json; None: returns `library`, the value of the model library. Raises ModelError for a bad value."""
    if path is None:
        return library
    file = folder_of(path) / GENERATION_FILE
    value = read_json_object(file).get(key)
    if value is None:
        return SAMPLING_DEFAULTS[key]
    is_whole = isinstance(SAMPLING_DEFAULTS[key], int)
    is_good = type(value) is int or (type(value) is float and not is_whole)
    require(f"{file}: {key!r}", value, is_good, "a whole number" if is_whole else "a finite number", ModelError)
    try:
        Recommended(**{key: value})
    except ConfigError as error:
        raise ModelError(f"{file}: {str(error).removeprefix('model.recommended.')}") from None
    number: float = value
    return number
