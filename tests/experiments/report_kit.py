"""Runs that are reported, and what their report says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.reports.report import report_from_folders
from experiments import simulate

MODEL = {"model": "qwen3_0.6b", "cost": "roofline", "device": {"name": "h100", "gemm_floor_ns": 2000}}
LOAD = {"num_requests": 120, "rate": 40.0}
TIGHT = {"num_gpu_blocks": 700}


def ran(folder: Path, **settings: Any) -> None:
    simulate(settings.pop("trace", LOAD), folder=folder, **{**MODEL, **settings})


def report(folder: Path, **options: Any) -> str:
    page = report_from_folders([folder], folder / "report.html", **options)
    text = page.with_suffix(".md").read_text().replace("\\", "").replace("\u00a0", " ")
    assert (folder / "report.html").read_text().count("Before you read on") == text.count("Before you read on")
    return text


def answered(said: str) -> list[str]:
    return [
        line for line in said.partition("## Answer")[2].partition("| trust |")[0].splitlines() if line.startswith("- ")
    ]
