"""Models from a folder: what can be simulated of them, and what is said."""

import json
from pathlib import Path

import pytest

from experiments.configuration.compose import compose_config, compose_from
from testbed.errors import ConfigError
from tests.experiments.kit import option

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip


def of_model(say, folder, *overrides, **changes):
    (folder / "config.json").write_text(json.dumps(SHAPE | changes))
    run = ["trace.num_requests=2", f"model.path={folder}", "overwrite=true", f"hydra.run.dir={folder / 'run'}"]
    return say("run", *run, *overrides)


def test_weights_quantised_in_a_way_that_is_not_priced_are_said(tmp_path, say):
    what = f"{tmp_path} has weights quantised by 'awq' (not fp8 or compressed-tensors)"
    awq = {"quantization_config": {"quant_method": "awq"}}
    priced = of_model(say, tmp_path, **awq).success()
    assert f"note         {what}: they are priced, and take memory, as bfloat16" in priced
    held = of_model(say, tmp_path, "cost=constant", "cache.num_gpu_blocks=null", "device=h100", **awq).success()
    assert f"note         {what}: they take memory as bfloat16" in held
    assert what not in of_model(say, tmp_path, "cost=constant", "cache.num_gpu_blocks=100", **awq).success()
    large = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 99}
    error = of_model(say, tmp_path, "cache.num_gpu_blocks=null", "device=h100", **awq, **large).error()
    assert error.startswith(f"{what}, which take memory as bfloat16 here: no room for one KV")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM is none of Qwen3ForCausalLM, "),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "it has sliding-window attention in some layers only;",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [1]}, "it has experts in some layers only;"),
    ],
)
def test_a_model_whose_weights_and_operators_are_not_known_is_not_simulated(tmp_path, say, changes, why):
    for options in ([], ["cost=constant", "cache.num_gpu_blocks=null"]):
        error = of_model(say, tmp_path, *options, **changes).error()
        assert error.startswith(f"model {tmp_path.name} (in {tmp_path}) cannot be simulated: {why}")
    of_model(say, tmp_path, "cost=constant", "cache.num_gpu_blocks=100", **changes).success()


def test_a_model_of_the_sizes_of_a_llama_is_priced_as_one(tmp_path, say):
    said = of_model(say, tmp_path, architectures=["Olmo2ForCausalLM"]).success()
    assert "note         Olmo2ForCausalLM is priced as a Llama of its sizes: its small operators differ" in said


def test_what_a_checkpoint_gives_cannot_be_set_beside_it(tmp_path: Path) -> None:
    """It would have no effect, and two arms that differ in it would be the same."""
    shape = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "vocab_size": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    path = f"model.path={tmp_path}"
    for key, given in (
        ("dtype", ".dtype=fp8"),
        ("recommended.top_k", ".recommended.top_k=3"),
        ("dtype", "={dtype: fp8}"),
    ):
        with pytest.raises(ConfigError, match=rf"^model\.{key} has no effect with model\.path, whose files give it: "):
            compose_config([f"model{given}", path])
    assert compose_config([path, "model.path=null", "model.dtype=fp8"]).model.dtype == "fp8"
    assert compose_config(["model=qwen3_8b", path]).model.hidden_size == 64
    with pytest.raises(ConfigError, match=r"model\.dtype has no effect"):
        compose_from(compose_config([path]).raw, ["model.dtype=fp8"])


def test_nor_in_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    place = f"hydra.searchpath=[{tmp_path}/conf]"
    files = {
        "experiment/half": "# @package _global_\nmodel:\n  dtype: float16\n",
        "model/both": f"defaults: [tiny, _self_]\npath: {tmp_path}\ndtype: float16\n",
        "model/only": f"defaults: [tiny, _self_]\npath: {tmp_path}\n",
        "model/mine": "defaults: [tiny, _self_]\ndtype: float16\n",
    }
    for name, text in files.items():
        option(tmp_path / "conf", name, text)
    for chosen, line in ((("experiment=half", f"model.path={tmp_path}"), 3), (("model=both",), 3)):
        with pytest.raises(ConfigError, match=rf"\.yaml, line {line}: model\.dtype has no effect with model\.path"):
            compose_config([place, *chosen])
    assert compose_config([place, "experiment=half"]).model.dtype == "float16"
    assert compose_config([place, "model=only"]).model.hidden_size == SHAPE["hidden_size"]
    assert compose_config([place, "model=mine", f"model.path={tmp_path}"]).model.hidden_size == SHAPE["hidden_size"]
