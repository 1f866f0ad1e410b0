"""Weights: from safetensors files, or random. Knows the names of a checkpoint's weights, not what they are for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from real.layers.linear import MergedColumnParallel
from testbed.errors import ModelError
from testbed.specs import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def checkpoint_views(model: nn.Module) -> dict[str, Tensor]:
    """Every weight by its name in a checkpoint, as a view of the parameter (or of the part of one) that it fills.

    A packed parameter appears as its parts; a weight that two modules share appears once, under its first name.
    """
    views: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, MergedColumnParallel):
                parent = path.rpartition(".")[0]
                for part, view in module.part_views(parameter).items():
                    views[f"{parent}.{part}.{name}"] = view
            else:
                views[f"{path}.{name}"] = parameter
    return views


def load_weights(model: nn.Module, spec: ModelSpec, load_format: str, seed: int) -> str:
    """Fills every weight; returns the format used: `safetensors` or `dummy` (random, drawn from the seed).

    `auto` reads safetensors when spec.path is a folder. Raises ModelError naming the weight, the file and the shapes.
    """
    is_folder = spec.path is not None and Path(spec.path).is_dir()
    if load_format == "dummy" or (load_format == "auto" and not is_folder):
        fill_random(model, seed)
        return "dummy"
    if spec.path is None:
        raise ModelError("backend.load_format=safetensors, but model.path is not set; set it or use load_format=dummy")
    load_safetensors(model, Path(spec.path), ignored=("lm_head.weight",) if spec.tie_word_embeddings else ())
    return "safetensors"


@torch.no_grad()
def fill_random(model: nn.Module, seed: int) -> None:
    """Random weights that keep activations at unit scale; norms lie around 1. The same seed gives the same weights."""
    views = checkpoint_views(model)
    generator = torch.Generator(next(iter(views.values())).device).manual_seed(seed % 2**64)  # torch takes 64 bits
    for view in views.values():
        if view.dim() == 1:
            view.normal_(1.0, 0.1, generator=generator)
        else:
            view.normal_(0.0, view.shape[-1] ** -0.5, generator=generator)


@torch.no_grad()
def load_safetensors(model: nn.Module, folder: Path, ignored: tuple[str, ...] = ()) -> None:
    """Copies each weight of the folder's safetensors files into place, converting the number format if need be.

    ignored: names that a checkpoint may hold and the model does not need. Raises ModelError.
    """
    views = checkpoint_views(model)
    missing = dict.fromkeys(views)
    for file in _weight_files(folder):
        with _open(file) as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                if name in ignored or name.endswith(".rotary_emb.inv_freq"):
                    continue
                if name not in views:
                    raise ModelError(
                        f"{file} holds weight {name!r}, which the model does not have; wrong model config?"
                    )
                _copy(weights.get_tensor(name), views[name], name, file)
                missing.pop(name, None)
    if missing:
        names = list(missing)
        rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
        shape = list(views[names[0]].shape)
        raise ModelError(f"{folder} lacks weight {names[0]!r} of shape {shape}{rest}; the checkpoint is incomplete")


def _copy(loaded: Tensor, view: Tensor, name: str, file: Path) -> None:
    if loaded.shape != view.shape:
        raise ModelError(
            f"{file}: weight {name!r} has shape {list(loaded.shape)}, the model config expects {list(view.shape)}"
        )
    view.copy_(loaded)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, or the only one."""
    if not folder.is_dir():
        raise ModelError(f"no model at {folder}: expected a folder with config.json and {SINGLE_FILE}")
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return [folder / SINGLE_FILE]
        others = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f"found {', '.join(others)}, which is not read" if others else "found no weights"
        raise ModelError(
            f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, {found}; backend.load_format=dummy draws random weights"
        )
    try:
        names = json.loads(index.read_text())["weight_map"].values()
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{index} is not an index of safetensors: expected JSON with a 'weight_map'") from None
    files = [folder / name for name in dict.fromkeys(names)]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{index} names {file.name}, which is not there; the checkpoint is incomplete")
    return files


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        opened = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}") from None
    with opened as weights:
        yield weights
