"""Runs that are reported, and what their report says."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from analysis.comparison.arms import Arm, infer_arms
from analysis.load import load_sweep
from analysis.reports.report import report_from_folders
from experiments import simulate

MODEL = {"model": "qwen3_0.6b", "cost": "roofline", "device": {"name": "h100", "gemm_floor_ns": 2000}}
LOAD = {"num_requests": 120, "rate": 40.0}
TIGHT = {"num_gpu_blocks": 700}


def ran(folder: Path, **settings: Any) -> None:
    simulate(settings.pop("trace", LOAD), folder=folder, **{**MODEL, **settings})


def ran_each(
    folder: Path, schedulers: Iterable[str] = ("vllm_v1", "sarathi"), *, num_seeds: int = 1, **settings: Any
) -> None:
    """A run under each scheduler with each seed."""
    for scheduler, seed in product(schedulers, range(num_seeds)):
        ran(folder / f"{scheduler}-{seed}", scheduler=scheduler, seed=seed, **settings)


def arms_of(folder: Path) -> list[Arm]:
    return infer_arms(load_sweep(folder).runs)


def report(folder: Path, **options: Any) -> str:
    page = report_from_folders([folder], folder / "report.html", **options)
    text = page.with_suffix(".md").read_text().replace("\\", "").replace("\u00a0", " ")
    assert (folder / "report.html").read_text().count("Before you read on") == text.count("Before you read on")
    return text


def answered(said: str) -> list[str]:
    return [
        line for line in said.partition("## Answer")[2].partition("| trust |")[0].splitlines() if line.startswith("- ")
    ]
