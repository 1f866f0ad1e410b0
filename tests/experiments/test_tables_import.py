"""Operator tables: what is imported from each source, in which units, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.tables import aiconfigurator
from experiments.tables.columns import rows_of
from experiments.tables.devices import model_spec
from experiments.tables.doubts import checked
from experiments.tables.llmservingsim import read as read_llmservingsim
from experiments.tables.roofline import bounds_ns
from experiments.tables.vidur import read as read_vidur
from sim.cost.measured import measure
from sim.cost.roofline import RooflineCost
from testbed.errors import ConfigError, ProfileError
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec
from testbed.specs.operator_tables import OperatorTables, check_rows
from tests.experiments import tables_on_the_spot as spot


def only(tables: OperatorTables, operator: str, **equal: Any) -> dict[str, Any]:
    """The one row that there is, without its nulls."""
    [row] = tables.select(operator, **equal).to_pylist()
    return {name: value for name, value in row.items() if value is not None}


# --- aiconfigurator ---


def test_latencies_are_ms_and_messages_are_elements(installed: Path) -> None:
    tables = aiconfigurator.load("h200")
    check_rows(tables.rows, "it")
    assert (tables.device, tables.device_description) == ("h200", "NVIDIA H200")
    product = only(tables, "gemm", m=8, n=128, dtype="bfloat16")
    assert product["time_ns"] == pytest.approx((0.002 + 8 * 128e-6) * 1e6)
    assert (product["engine"], product["licence"]) == ("vllm 0.24.0", "Apache-2.0")
    assert product["source"] == "aiconfigurator-core 0.12.3"
    assert only(tables, "all_reduce", kernel="graph", num_bytes=256)["time_ns"] == pytest.approx(5_001.28)
    assert only(tables, "all_reduce", kernel="NCCL", dtype="float16")["num_bytes"] == 1024
    assert only(tables, "all_reduce", kernel="NCCL", dtype="int8")["num_bytes"] == 512
    gathered = only(tables, "all_gather", dtype="float16")
    assert (gathered["num_bytes"], gathered["num_ranks"], gathered["engine"]) == (1024, 4, "nccl 2.29.2")
    assert tables.doubts[-2:] == (
        "all_reduce: eager calls are timed with the host's launches, never below 5 us",
        "no embedding, norms, rotary, activation, sampler or host time: kernels of these tables only",
    )


def test_a_decode_attends_to_its_step_and_itself(installed: Path) -> None:
    tables = aiconfigurator.load("h200_sxm")  # their name
    decode = only(tables, "attention_decode", context=16)
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "batch": 4, "dtype": "bfloat16", "kv_dtype": "fp8"}
    assert sizes.items() <= decode.items()
    assert "window" not in decode
    prefill = only(tables, "attention_prefill", new_tokens=32)
    assert (prefill["context"], prefill["batch"], prefill["num_kv_heads"]) == (0, 2, 8)
    assert any("whole prompts" in doubt for doubt in tables.doubts)


def test_windows_and_kv_heads_of_0_mean_none_and_all(tmp_path: Path) -> None:
    rows = spot.aiconfigurator_rows()["prefill"]
    rows[0] |= {"window_size": 128, "num_key_value_heads": 0}
    tables = aiconfigurator.load("h200", systems=spot.aiconfigurator(tmp_path, prefill=rows))
    cut = only(tables, "attention_prefill", new_tokens=16)
    assert (cut["window"], cut["num_kv_heads"]) == (128, 8)


def test_the_newest_version_is_taken_and_the_nearest_all_reduce(tmp_path: Path) -> None:
    spot.aiconfigurator(tmp_path, version="0.9.1")
    systems = spot.aiconfigurator(tmp_path, version="0.24.0", reduce=[])
    tables = aiconfigurator.load("h200", systems=systems)
    assert only(tables, "gemm", m=1, n=64, dtype="bfloat16")["engine"] == "vllm 0.24.0"
    assert only(tables, "all_reduce", kernel="graph", num_bytes=256)["engine"] == "vllm 0.9.1"
    assert "vllm 0.24.0 has no all-reduce of its own there: that of 0.9.1 is taken" in tables.doubts
    old = aiconfigurator.load("h200", version="0.9.1", systems=systems)
    assert only(old, "gemm", m=1, n=64, dtype="bfloat16")["engine"] == "vllm 0.9.1"
    with pytest.raises(ConfigError, match=r"^--version is '0\.9\.2'; did you mean '0\.9\.1'\? valid: 0"):
        aiconfigurator.load("h200", version="0.9.2", systems=systems)


def test_a_release_is_newer_than_its_candidates(tmp_path: Path) -> None:
    in_order = ("0.9.0", "0.24.0", "1.3.0rc5", "1.3.0rc20", "1.3.0", "1.3.0.post1", "1.3.0.post10")
    for version in sorted(in_order):
        systems = spot.aiconfigurator(tmp_path, version=version)
    with pytest.raises(ConfigError, match=f"valid: {', '.join(in_order)}$"):
        aiconfigurator.load("h200", version="2", systems=systems)
    old = aiconfigurator.load("h200", version="1.3.0rc5", systems=systems)
    assert only(old, "all_reduce", kernel="graph", num_bytes=256)["engine"] == "vllm 1.3.0rc5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h2000",), r"no tables of the device 'h2000'; did you mean 'h200'\? valid: gb200, h200"),
        (("a100",), "no tables of the device 'a100'.*; import tables of your own .*, or choose cost=roofline$"),
        (("h200", "vlm"), "^--engine is 'vlm'; did you mean 'vllm'"),
        (("h200", "sglang"), "no tables of sglang on h200_sxm; import tables of your own"),
    ],
)
def test_what_the_package_lacks_is_named(installed: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        aiconfigurator.load(*arguments)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemm", {"latency": 1e-9}, r"gemm_perf.parquet, row 1: latency is 1e-09; expected ms, from 0.0001 to 1e\+06"),
        ("gemm", {"latency": None}, "row 1: latency is null; expected ms"),
        (
            "gemm",
            {"k": None},
            r"aiconfigurator-core 0.12.3, h200_sxm, row 1: k is null; expected at least 1: gemm needs",
        ),
        ("decode", {"latency": -1.0}, r"generation_attention_perf.parquet, row 1: latency is -1\.0; expected ms"),
        ("reduce", {"allreduce_dtype": "fp3"}, "custom_allreduce_perf.parquet: messages of dtype 'fp3'; did you mean"),
    ],
)
def test_a_bad_value_of_the_package_is_named(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    rows = spot.aiconfigurator_rows()[name]
    rows[1] |= change
    systems = spot.aiconfigurator(tmp_path, **{name: rows})
    with pytest.raises(ProfileError, match=message):
        aiconfigurator.load("h200", systems=systems)


def test_a_column_of_something_else_is_named(tmp_path: Path) -> None:
    rows = [row | {"m": f"{row['m']} rows"} for row in spot.aiconfigurator_rows()["gemm"]]
    systems = spot.aiconfigurator(tmp_path, gemm=rows)
    with pytest.raises(ProfileError, match=r"gemm_perf.parquet: the column 'm' is of string; expected int64"):
        aiconfigurator.load("h200", systems=systems)


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    rows = [
        {name: value for name, value in row.items() if name != "isl"} for row in spot.aiconfigurator_rows()["decode"]
    ]
    with pytest.raises(ProfileError, match=r"generation_attention_perf.parquet lacks the column 'isl'; it has "):
        aiconfigurator.load("h200", systems=spot.aiconfigurator(tmp_path, decode=rows))


# --- LLMServingSim ---


def test_layers_get_the_shapes_of_the_model_that_is_named(tmp_path: Path) -> None:
    folder = spot.llmservingsim(tmp_path)
    tables = read_llmservingsim(folder)
    check_rows(tables.rows, "it")
    assert (tables.device, tables.device_description) == ("rtx4090", "NVIDIA RTX 4090")
    shapes = {"qkv_proj": (6144, 4096), "o_proj": (4096, 4096), "gate_up_proj": (28672, 4096),
              "down_proj": (4096, 14336)}  # fmt: skip
    for kernel, (n, k) in shapes.items():
        alone = only(read_llmservingsim(folder / "tp1"), "gemm", kernel=kernel, m=8)
        assert (alone["n"], alone["k"], alone["time_ns"]) == (n, k, 308_000.0)
    halves = {row["kernel"]: (row["n"], row["k"]) for row in tables.select("gemm", m=8).to_pylist()[4:]}
    assert halves == {"qkv_proj": (3072, 4096), "o_proj": (4096, 2048), "gate_up_proj": (14336, 4096),
                      "down_proj": (4096, 7168)}  # fmt: skip
    assert only(tables, "gemm", kernel="lm_head", m=2, n=64128)["k"] == 4096
    assert only(tables, "elementwise", kernel="act_fn", m=8, n=7168)["engine"] == "vllm 0.19.0"


@pytest.mark.parametrize(("place", "num"), [("", 57), ("tp2", 31)])
def test_the_folder_may_be_the_one_that_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, num: int
) -> None:
    monkeypatch.chdir(spot.llmservingsim(tmp_path) / place)
    assert read_llmservingsim(Path()).rows.num_rows == num


def test_what_the_profiler_copies_to_all_ranks_is_taken_once(tmp_path: Path) -> None:
    folder = spot.llmservingsim(tmp_path)
    assert only(read_llmservingsim(folder), "sampler", m=2)["n"] == 128256
    assert only(read_llmservingsim(folder / "tp2"), "sampler", m=2)["n"] == 128256
    assert only(read_llmservingsim(folder), "elementwise", kernel="layernorm", m=8)["n"] == 4096


def test_calls_of_attention_are_told_apart_and_decodes_see_themselves(tmp_path: Path) -> None:
    tables = read_llmservingsim(spot.llmservingsim(tmp_path) / "tp2")
    heads = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    rows = {name: only(tables, f"attention_{name}") for name in ("decode", "prefill", "mixed")}
    assert all(heads.items() <= row.items() for row in rows.values())
    assert {"batch": 4, "context": 129, "time_ns": 20_500.0}.items() <= rows["decode"].items()
    assert {"batch": 1, "new_tokens": 16, "context": 32, "time_ns": 30_500.0}.items() <= rows["prefill"].items()
    mixed = {"batch": 4, "new_tokens": 16, "context": 32, "decode_context": 129, "time_ns": 40_500.0}
    assert mixed.items() <= rows["mixed"].items()


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("dense.csv", "o_proj,16,12.x", r"dense.csv:26: time_us is '12\.x'; expected a number"),
        ("dense.csv", "o_proj,16,", "dense.csv:26: time_us is empty; expected a number"),
        ("dense.csv", "o_proj,1.5,12", r"dense.csv:26: tokens is '1\.5'; expected a whole number, at least 1"),
        ("dense.csv", "o_proj,16,1e-9", "dense.csv:26: time_us is '1e-9'; expected us, from 0.1 to 1e"),
        ("dense.csv", "o_proj,16,inf", "dense.csv:26: time_us is 'inf'; expected a finite number"),
        ("dense.csv", "gate,16,12", "dense.csv:26: layer is 'gate'; expected one of qkv_proj, o_proj"),
        ("dense.csv", "o_proj,16", "dense.csv:26: 2 cells; expected 3, as in the header"),
        ("dense.csv", "o,1,2,\0\x1b[31m" + "x" * 500, "dense.csv:26: 4 cells; expected 3, as in the header$"),
        ("attention.csv", "0,0,0,16,12", "attention.csv:5: prefill_chunk is '0'; expected a chunk or decodes"),
        (
            "attention.csv",
            "0,0,-1,16,12",
            "attention.csv:5: n_decode is '-1'; expected a whole number, at least 0",
        ),
    ],
)
def test_a_bad_line_of_a_csv_is_named(tmp_path: Path, file: str, line: str, message: str) -> None:
    folder = spot.llmservingsim(tmp_path, sizes=(1,))
    path = folder / "tp1" / file
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ProfileError, match=message):
        read_llmservingsim(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"layer,tokens,time_us\no_proj,1,2\no_proj,\xff\xfe,2\n", "dense.csv:3: not UTF-8 text"),
        (b"\xff\xfe\x1b,tokens\n1,2\n", "dense.csv:1: not UTF-8 text"),
        (b"\x1b[31m,tokens\n1,2\n", r"dense.csv lacks the column 'layer'; it has \\x1b\[31m, tokens"),
        (
            b"layer,tokens,tokens,time_us\na,1,1,2\n",
            "dense.csv:1: column 'tokens' occurs twice; expected each name once",
        ),
        (b"layer,tokens,time_us,,\na,1,2,3,\n", "dense.csv:2: layer is 'a'; expected one of"),
        (b"layer,tokens,time_us\n\n\na,1,2\n", "dense.csv:4: layer is 'a'; expected one of"),
        (b"", "dense.csv: the file is empty; expected a header and rows"),
    ],
)
def test_a_csv_that_is_none_is_named_without_its_bytes(tmp_path: Path, content: bytes, message: str) -> None:
    folder = spot.llmservingsim(tmp_path, sizes=(1,))
    (folder / "tp1" / "dense.csv").write_bytes(content)
    with pytest.raises(ProfileError, match=message) as found:
        read_llmservingsim(folder)
    assert str(found.value).isprintable()


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("Llama-3.1-8B", "Llama-9-8B", ConfigError, "no model 'meta-llama/Llama-9-8B'; say which it is with --model"),
        ("gpu: NVIDIA RTX 4090\nhardware: RTX4090", "hardware: TPU", ConfigError,
         "the library has no device 'TPU'; say which it is with"),
        ("hardware: RTX4090\n", "", ProfileError, "meta.yaml: 'hardware' is None; expected a string"),
        ("variant: bf16", "variant: int3", ProfileError, "'variant' is 'int3'; expected one of bf16"),
        ("intermediate_size: 7168", "intermediate_size: 7000", ProfileError, "7000, which is no share of 14336"),
        ("model: meta", "model: [", ProfileError, "meta.yaml cannot be read as YAML"),
    ],
)  # fmt: skip
def test_a_bad_meta_file_is_named(tmp_path: Path, old: str, new: str, error: type[Exception], message: str) -> None:
    folder = spot.llmservingsim(tmp_path, spot.META.replace(old, new))
    with pytest.raises(error, match=message):
        read_llmservingsim(folder)


def test_a_model_and_a_device_can_be_said(tmp_path: Path) -> None:
    meta = spot.META.replace("Llama-3.1-8B", "mine").replace("hardware: RTX4090", "hardware: mine")
    tables = read_llmservingsim(spot.llmservingsim(tmp_path, meta), "l40s", "llama3.1_8b")
    assert tables.device == "l40s"


def test_tables_of_another_device_than_is_said_are_doubted(tmp_path: Path) -> None:
    folder = spot.llmservingsim(tmp_path)
    tables = read_llmservingsim(folder, "h100")
    assert tables.device == "h100"
    assert tables.doubts[0] == (
        "meta.yaml says 'NVIDIA RTX 4090', and --device is h100: are these tables of that device?"
    )
    assert not any("--device" in doubt for doubt in read_llmservingsim(folder, "rtx4090").doubts)


@pytest.mark.parametrize(("factor", "is_doubted"), [(1.5, False), (1000.0, True)])
def test_products_that_are_far_too_slow_are_doubted(factor: float, is_doubted: bool) -> None:
    m, size = np.array([256, 512, 1024, 2048, 4096]), 4096
    bare = rows_of(5, operator="gemm", dtype="bfloat16", m=m, n=size, k=size, time_ns=np.ones(5))
    sheet = DeviceSpec("h100")
    rows = rows_of(
        5, operator="gemm", kernel="k", dtype="bfloat16", m=m, n=size, k=size, engine="e", source="s", licence="l",
        time_ns=factor * bounds_ns("gemm", bare.to_pandas(), sheet),
    )  # fmt: skip
    doubts = checked(OperatorTables("h100", "", rows), sheet).doubts
    said = "gemm: half of 5 large points take more than 1e+03 x the time of the data sheet of h100"
    assert any(doubt.startswith(said) for doubt in doubts) == is_doubted


def test_of_many_doubts_those_that_are_not_told_are_counted() -> None:
    tables = OperatorTables("mine", "", rows_of(0), tuple(f"doubt {number}" for number in range(12)))
    assert checked(tables, None).doubts[8:] == ("doubt 8", "and 3 more, each about fewer points")


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"holds no meta\.yaml; expected <gpu>/<org>/<model>/<dtype>/"):
        read_llmservingsim(tmp_path)
    folder = spot.llmservingsim(tmp_path, sizes=(1,))
    (folder / "tp1" / "attention.csv").unlink()
    with pytest.raises(ProfileError, match=r"no file at .*attention\.csv"):
        read_llmservingsim(folder)


# --- Vidur ---


def test_vidurs_columns_give_the_shapes_of_a_rank(tmp_path: Path) -> None:
    tables = read_vidur(spot.vidur(tmp_path), "a100")
    check_rows(tables.rows, "it")
    found = {row["kernel"]: (row["n"], row["k"]) for row in tables.select("gemm", m=2).to_pylist()}
    assert found == {"attn_pre_proj": (256 + 2 * 64, 512), "attn_post_proj": (512, 256),
                     "mlp_up_proj": (2048, 512), "mlp_down_proj": (512, 1024)}  # fmt: skip
    layers = {(row["kernel"], row["n"]) for row in tables.select("elementwise", m=2).to_pylist()}
    assert layers == {("emb", 512), ("layernorm", 512), ("rotary_emb", 256 + 64), ("act_fn", 1024), ("add", 512)}
    decode, prefill = only(tables, "attention_decode"), only(tables, "attention_prefill")
    assert {"batch": 4, "context": 100, "num_heads": 4, "num_kv_heads": 1, "head_dim": 64}.items() <= decode.items()
    assert {"new_tokens": 64, "context": 32, "time_ns": 250_000.0}.items() <= prefill.items()
    assert decode["kernel"] == "flash_attention"
    file = tmp_path / "mlp.csv"
    file.write_text(file.read_text().replace("True", "False"))
    assert only(read_vidur(tmp_path, "a100"), "gemm", kernel="mlp_up_proj", m=2)["n"] == 1024, "not gated"


def test_vidurs_small_layers_are_found_by_a_price(tmp_path: Path) -> None:
    """Two norms, rotary embedding and activation of 0.5 ms each."""
    model = replace(model_spec("llama3.1_8b"), hidden_size=512, intermediate_size=2048, num_attention_heads=8,
                    num_key_value_heads=2, head_dim=64)  # fmt: skip
    found = measure(read_vidur(spot.vidur(tmp_path), "a100"), model, 2, None, None, _roofline)
    assert found.elementwise is not None
    assert found.elementwise.grid.along(2.0) == pytest.approx(4 * 500_000.0)


def _roofline(model: ModelSpec, size: int) -> RooflineCost:
    return RooflineCost(model, DeviceSpec("a100", interconnect="pcie_p2p"), tensor_parallel_size=size)


def test_vidurs_collectives_are_bytes_and_a_gather_is_its_whole(tmp_path: Path) -> None:
    tables = read_vidur(spot.vidur(tmp_path), "a100")
    assert only(tables, "all_reduce")["num_bytes"] == 2048
    assert only(tables, "all_gather")["num_bytes"] == 4 * 2048
    assert any("all_reduce.csv: 2 points across nodes, or of other ranks, are left out" in d for d in tables.doubts)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("attention.csv", "0.25,", ",", r"attention\.csv:2: .*attn_prefill.* is empty; expected a time: is_pref"),
        ("all_gather.csv", "2048,all_gather", "2048,send", r"all_gather\.csv:2: collective is 'send'; expected all_"),
    ],
)
def test_vidurs_rows_must_be_of_what_they_say(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    path = spot.vidur(tmp_path) / file
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ProfileError, match=message):
        read_vidur(tmp_path, "a100")


def test_vidurs_files_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"holds none of mlp\.csv, attention\.csv"):
        read_vidur(tmp_path, "a100")
    file = spot.vidur(tmp_path) / "mlp.csv"
    file.write_text(file.read_text().replace("n_expanded_embd", "n_other"))
    with pytest.raises(ProfileError, match=r"mlp\.csv lacks the column 'n_expanded_embd'; it has time_stats"):
        read_vidur(tmp_path, "a100")
    with pytest.raises(ConfigError, match="do not name their device; say which it is with --device"):
        read_vidur(tmp_path, None)
