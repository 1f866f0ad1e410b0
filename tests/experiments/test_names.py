"""Names that drivers, studies and Hugging Face give: one function for each group says which of the library is meant."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from experiments.configuration.compose import compose_config
from experiments.configuration.names import device_named, device_of_run, model_named
from experiments.configuration.options import options
from experiments.fidelity.comparing import _of_device
from experiments.fidelity.loads import Load
from experiments.tables.llmservingsim import read
from tests.experiments import tables_on_the_spot as spot

SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100_SXM", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTX4090", "rtx4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx_pro_6000"),
        (SERVER, "rtx_pro_6000_server"),
        ("RTX PRO 6000 Server", "rtx_pro_6000_server"),
        ("rtx_pro_6000_server", "rtx_pro_6000_server"),
        ("RTXPRO6000", "rtx_pro_6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GB300", "gb300"),
        ("Intel(R) Xeon(R) CPU", None),
        ("NVIDIA GT400", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA L40", None),
        ("NVIDIA GH200 480GB", None),
        ("Abacus", None),
    ],
)
def test_a_device_is_named_as_the_library_names_it(said: str, name: str | None) -> None:
    assert device_named(said) == name


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama3.1_70b"),
        ("meta-llama/Meta-Llama-3-8B", "llama3_8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2_7b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral_nemo_12b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral_7b_v0.1"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral_small_24b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5_7b"),
        ("01-ai/Yi-34B", "yi_34b"),
        ("facebook/opt-1.3b", "opt_1.3b"),
        ("facebook/opt-13b", "opt_13b"),
        ("llama-3-1-8b", "llama3.1_8b"),
        ("acme/none", None),
    ],
)
def test_a_model_is_named_as_the_library_names_it(said: str, name: str | None) -> None:
    assert model_named(said) == name


def test_every_entry_has_its_own_name() -> None:
    assert [device_named(name) for name in options("device")] == options("device")
    assert [model_named(name) for name in options("model")] == options("model")


def test_a_profile_is_of_the_device_that_its_driver_names(tmp_path: Path) -> None:
    meta = spot.META.replace("NVIDIA RTX 4090", SERVER).replace("RTX4090", "RTXPRO6000")
    tables = read(spot.llmservingsim(tmp_path, meta))
    assert (tables.device, tables.device_description) == ("rtx_pro_6000_server", SERVER)


def test_a_profile_is_of_the_model_that_a_study_finds(tmp_path: Path) -> None:
    meta = spot.META.replace("meta-llama/Llama-3.1-8B", "mistralai/Mistral-Nemo-Instruct-2407")
    tables = read(spot.llmservingsim(tmp_path, meta, sizes=(1,)))
    assert tables.select("gemm", kernel="qkv_proj", m=8)["k"].to_pylist() == [5120]


CPU = "AMD EPYC, 2 threads"


@pytest.mark.parametrize(
    ("ran_on", "simulated", "said"),
    [
        (SERVER, ["device=rtx_pro_6000_server"], ""),
        (SERVER, ["device=rtx_pro_6000"], "simulated as device=rtx_pro_6000"),
        (CPU, ["device=h100"], "simulated as device=h100"),
        (CPU, ["device=cpu"], "no data sheet knows a CPU's prices"),
        (CPU, ["device=cpu", "cost=linear"], ""),
    ],
)
def test_a_run_on_another_device_is_noted_and_one_that_no_data_sheet_knows(
    ran_on: str, simulated: list[str], said: str
) -> None:
    measured: Any = SimpleNamespace(measured=SimpleNamespace(manifest={"device": ran_on}))
    notes = _of_device(cast(Load, measured), compose_config(simulated))
    assert said in "".join(notes)
    assert bool(notes) == bool(said)


def test_where_a_run_was_measured_is_a_device_of_the_library() -> None:
    assert device_of_run(CPU) == device_of_run("Some CPU, 1 thread") == device_of_run("cpu") == "cpu"
    assert device_of_run(SERVER) == "rtx_pro_6000_server"
    assert device_of_run("A card, that nobody knows") is None
