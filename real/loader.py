"""Weights: from safetensors files, or random. Knows the names of a checkpoint's weights, but not their use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from real.layers.slots import HasSlots, Slot, whole
from real.parallel.processes import is_spawned
from testbed.errors import ModelError
from testbed.foreign_text import parsed
from testbed.specs.model import ModelSpec

T = TypeVar("T")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FORMATS = ("F32", "F16", "BF16", "F64")
FP8_STORED = ("F8_E4M3",)  # of weights that stay in FP8
FP8_FACTOR = 64  # random FP8 weights are this much larger, and their scales smaller, so that few are rounded to 0


def checkpoint_slots(model: nn.Module) -> dict[str, Slot]:
    """Returns the slot of every weight on this rank, by the weight's name in a checkpoint.

    A packed parameter is listed as its parts. A weight that two modules share is listed once, under its first name.
    """
    slots: dict[str, Slot] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            parts = module.slots(name, parameter) if isinstance(module, HasSlots) else {"": whole(parameter)}
            parent = path.rpartition(".")[0]
            slots |= {f"{parent}.{part}.{name}" if part else f"{path}.{name}": slot for part, slot in parts.items()}
    return slots


def tied_names(model: nn.Module) -> dict[str, str]:
    """Maps further names of shared weights to their first name."""
    firsts: dict[int, str] = {}
    names = model.named_parameters(remove_duplicate=False)
    pairs = [(name, firsts.setdefault(id(parameter), name)) for name, parameter in names]
    return {name: first for name, first in pairs if name != first}


def load_weights(model: nn.Module, spec: ModelSpec, load_format: str, seed: int) -> str:
    """Fills every weight; returns the format that was used: `safetensors` or `dummy` (random, from the seed).

    `auto` reads safetensors if spec.path is a folder. Raises ModelError naming the weight, the file and the shapes.
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
    """Fills in random weights that keep activations at unit scale; norms are around 1, biases around 0.

    The same seed gives the same model for any number of ranks: each generates the whole weights and keeps its part.
    """
    slots = checkpoint_slots(model)
    device = next(iter(slots.values())).view.device
    generator = torch.Generator(device).manual_seed(seed % 2**64)  # torch takes 64 bits
    for name, slot in _shown(slots.items(), len(slots)):
        is_fp8, is_scale = slot.view.dtype.itemsize == 1, ".weight_scale" in name
        dtype = torch.float32 if is_fp8 else slot.view.dtype
        in_place = slot.is_whole and not is_fp8
        full = slot.view if in_place else torch.empty(slot.full_shape, dtype=dtype, device=device)
        if is_scale:
            full.normal_(1 / FP8_FACTOR, 0.1 / FP8_FACTOR, generator=generator)
        elif len(slot.full_shape) == 1:
            full.normal_(0.0 if name.endswith(".bias") else 1.0, 0.1, generator=generator)
        else:
            full.normal_(0.0, (FP8_FACTOR if is_fp8 else 1) * slot.full_shape[-1] ** -0.5, generator=generator)
        if not in_place:
            slot.view.copy_(slot.part_of(full))


@torch.no_grad()
def load_safetensors(model: nn.Module, folder: Path) -> None:
    """Copies this rank's part of each weight from the folder's safetensors files, and converts the number format if
    necessary.

    Raises ModelError for a weight that is missing, unknown, not finite, of another shape or format, or different from
    the weight to which it is tied.
    """
    slots, aliases = checkpoint_slots(model), tied_names(model)
    missing = dict.fromkeys(slots)
    heads: list[tuple[str, Path, Slot]] = []
    for file in _weight_files(folder):
        with _open(file) as weights:
            stored_names: list[str] = weights.keys()
            for stored_name in _shown(stored_names, len(stored_names)):
                name = _own_name(stored_name, slots)
                if name is None:
                    continue
                if name in aliases:
                    heads.append((name, file, slots[aliases[name]]))
                    continue
                if name not in slots:
                    raise ModelError(
                        f"{file} holds weight {name!r}, which the model does not have; wrong model config?"
                    )
                _fill(slots[name], weights, stored_name, file)
                missing.pop(name, None)
    for name, file, slot in heads:
        if aliases[name] in missing:  # stored under its further name alone
            with _open(file) as weights:
                _fill(slot, weights, name, file)
            del missing[aliases[name]]
        else:
            _check_tied(name, aliases[name], slot, file)
    if missing:
        raise _incomplete(folder, {name: slots[name] for name in missing})


def _shown(items: Iterable[T], num: int) -> Iterable[T]:
    """The weights, with a progress bar if standard error is a terminal; only in the process that a user started."""
    if is_spawned() or parent_process() is not None:
        return items
    return tqdm(items, "weights", num, unit="weight", leave=False, delay=0.5, disable=None)


def _fill(slot: Slot, weights: Any, name: str, file: Path) -> None:
    slot.view.copy_(_read(weights, name, slot, file))
    if not _is_finite(slot.view):
        dtype = str(slot.view.dtype).removeprefix("torch.")
        raise ModelError(
            f"{file}: weight {name!r} has values that are not finite, as {dtype}; the checkpoint is damaged, or "
            "backend.dtype too narrow for it"
        )


def _is_finite(view: Tensor) -> bool:
    """Whether all values are finite. FP8 is checked as float16, which represents all its values."""
    return bool((view.half() if view.dtype.itemsize == 1 else view).isfinite().all())


def _own_name(stored: str, slots: dict[str, Slot]) -> str | None:
    """Returns a stored weight's name in the model; None if the model does not need it.

    A checkpoint of the model without its head lacks the first level of the names. Scales of activations are not used,
    as activations are not quantised.
    """
    if stored.endswith((".rotary_emb.inv_freq", ".input_scale")):
        return None
    return f"model.{stored}" if f"model.{stored}" in slots else stored


def _incomplete(folder: Path, missing: dict[str, Slot]) -> ModelError:
    name, slot = next(iter(missing.items()))
    rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    fix = "; or does its config.json lack tie_word_embeddings: true?" if name == "lm_head.weight" else ""
    return ModelError(
        f"{folder} lacks weight {name!r} of shape {list(slot.full_shape)}{rest}; the checkpoint is incomplete{fix}"
    )


def _check_tied(name: str, other: str, slot: Slot, file: Path) -> None:
    """Raises ModelError if a tied weight that the checkpoint repeats has other values."""
    with _open(file) as weights:
        if not torch.equal(_read(weights, name, slot, file).to(slot.view), slot.view):
            raise ModelError(
                f"{file}: weight {name!r} differs from {other!r}, and config.json ties them; set tie_word_embeddings "
                "to false there if the model does not"
            )


def _read(weights: Any, name: str, slot: Slot, file: Path) -> Tensor:
    """Returns this rank's part of a stored weight; only that part is read from the file."""
    stored = weights.get_slice(name)
    shape, dtype, expected = list(stored.get_shape()), stored.get_dtype(), list(slot.full_shape)
    if shape != expected and (shape, expected) != ([1], []):
        raise ModelError(f"{file}: weight {name!r} has shape {shape}, the model config expects {expected}")
    formats = FP8_STORED if slot.view.dtype.itemsize == 1 else FORMATS
    if dtype not in formats:
        raise ModelError(f"{file}: weight {name!r} is stored as {dtype}; expected one of {', '.join(formats)}")
    if not expected:
        scalar: Tensor = weights.get_tensor(name)
        return scalar.reshape(())
    stop = slot.start + slot.view.shape[slot.dim]
    part: Tensor = stored[slot.start : stop] if slot.dim == 0 else stored[:, slot.start : stop]
    return part


def _weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint: those that its index lists, or the only one."""
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
        names = parsed(json.loads, index.read_bytes())["weight_map"].values()
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{index} is not an index of safetensors: expected JSON with a 'weight_map'") from None
    for name in dict.fromkeys(names):
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names {name!r}; expected the name of a file beside it")
    files = [folder / name for name in dict.fromkeys(names)]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{index} names {file.name}, which is not there; the checkpoint is incomplete")
    if (folder / SINGLE_FILE).is_file() and folder / SINGLE_FILE not in files:
        raise ModelError(f"{folder} has {SINGLE_FILE} and also {INDEX_FILE}, which names others; remove what is old")
    return files


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        opened = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}") from None
    with opened as weights:
        yield weights
