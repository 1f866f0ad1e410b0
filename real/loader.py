"""Weights: from safetensors files, or random. Knows the names of a checkpoint's weights, not what they are for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from real.layers.slots import HasSlots, Slot, whole
from testbed.errors import ModelError
from testbed.specs import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def checkpoint_slots(model: nn.Module) -> dict[str, Slot]:
    """Every weight by its name in a checkpoint, and where it goes on this rank.

    A packed parameter appears as its parts; a weight that two modules share appears once, under its first name.
    """
    return {name: slot for name, slot in _all_slots(model) if slot is not None}


def _all_slots(model: nn.Module) -> Iterator[tuple[str, Slot | None]]:
    """None: another name of a weight that came before."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_new = id(parameter) not in seen
            seen.add(id(parameter))
            slots = module.slots(name, parameter) if isinstance(module, HasSlots) else {"": whole(parameter)}
            parent = path.rpartition(".")[0]
            for part, slot in slots.items():
                owner = f"{parent}.{part}" if part else path
                yield f"{owner}.{name}", slot if is_new else None


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
    load_safetensors(model, Path(spec.path))
    return "safetensors"


@torch.no_grad()
def fill_random(model: nn.Module, seed: int) -> None:
    """Random weights that keep activations at unit scale; norms lie around 1, biases around 0.

    The same seed gives the same model, however many ranks share it: each draws the whole and keeps its part.
    """
    slots = checkpoint_slots(model)
    device = next(iter(slots.values())).view.device
    generator = torch.Generator(device).manual_seed(seed % 2**64)  # torch takes 64 bits
    for name, slot in slots.items():
        full = slot.view if slot.is_whole else torch.empty(slot.full_shape, dtype=slot.view.dtype, device=device)
        if len(slot.full_shape) == 1:
            full.normal_(0.0 if name.endswith(".bias") else 1.0, 0.1, generator=generator)
        else:
            full.normal_(0.0, slot.full_shape[-1] ** -0.5, generator=generator)
        if not slot.is_whole:
            slot.view.copy_(slot.part_of(full))


@torch.no_grad()
def load_safetensors(model: nn.Module, folder: Path) -> None:
    """Copies this rank's part of each weight of the folder's safetensors files into place, converting the number
    format if need be.

    Raises ModelError for a weight that is missing, unknown, of another shape or format, or not the one it is tied to.
    """
    slots = checkpoint_slots(model)
    aliases = {name for name, slot in _all_slots(model) if slot is None}
    missing = dict.fromkeys(slots)
    for file in _weight_files(folder):
        with _open(file) as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                if name in aliases or name.endswith(".rotary_emb.inv_freq"):
                    continue
                if name not in slots:
                    raise ModelError(
                        f"{file} holds weight {name!r}, which the model does not have; wrong model config?"
                    )
                _copy(weights.get_slice(name), slots[name], name, file)
                missing.pop(name, None)
    if missing:
        names = list(missing)
        rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
        shape = list(slots[names[0]].full_shape)
        raise ModelError(f"{folder} lacks weight {names[0]!r} of shape {shape}{rest}; the checkpoint is incomplete")


def _copy(stored: Any, slot: Slot, name: str, file: Path) -> None:
    """stored: a slice of safetensors, which reads from the file no more than is asked of it."""
    shape = list(stored.get_shape())
    if shape != list(slot.full_shape):
        raise ModelError(f"{file}: weight {name!r} has shape {shape}, the model config expects {list(slot.full_shape)}")
    stop = slot.start + slot.view.shape[slot.dim]
    part = stored[slot.start : stop] if slot.dim == 0 else stored[:, slot.start : stop]
    slot.view.copy_(part)


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
