"""Norms, heads (norm, rotation, store) and argmax on a CPU, by layers.c: for a layer's parts torch needs some thirty
operators, each of which reads and writes memory. Without a C compiler, torch's operators are used."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from real.kernels.host import library, why_no_library

P = ParamSpec("P")
FORMATS = (torch.float32, torch.bfloat16)


class _Heads(ctypes.Structure):
    """The struct of the same name in real/kernels/layers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "key_cache", "value_cache", "value")),
        *((name, ctypes.c_void_p) for name in ("query_weight", "key_weight", "cos", "sin", "slots")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        ("eps", ctypes.c_float),
    )


def by_host(kernel: Callable[P, Tensor]) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Decorates a function whose first argument is a tensor: calls `kernel` instead if C `takes` that tensor."""

    def decorate(fn: Callable[P, Tensor]) -> Callable[P, Tensor]:
        @wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            first: Any = args[0]
            return kernel(*args, **kwargs) if takes(first) else fn(*args, **kwargs)

        return call

    return decorate


def takes(x: Tensor) -> bool:
    """Whether x is contiguous rows on a CPU, in a format that C computes. (Only two dimensions: heads cut from a wider
    projection are contiguous for one token only, and which code computes them must not depend on that.)"""
    is_plain = x.device.type == "cpu" and x.dtype in FORMATS and x.dim() == 2 and x.is_contiguous()
    return is_plain and why_no_library() is None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As real.layers.norm.rms_norm; add_rms_norm likewise."""
    return _normalize(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normalize(x, residual, weight, eps)


def _normalize(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    size = weight.numel()
    output = torch.empty_like(x)
    if residual is not None:
        residual = residual.contiguous()
        assert residual.dtype == x.dtype
        assert residual.shape == x.shape
    assert weight.dtype == x.dtype
    assert x.shape[-1] == size
    assert weight.is_contiguous()
    library().normalize_rows(
        _place(x), None if residual is None else _place(residual), _place(weight), _place(output),
        ctypes.c_int64(x.numel() // size), ctypes.c_int64(size), ctypes.c_float(eps), *_how(x),
    )  # fmt: skip
    return output


def argmax(logits: Tensor) -> Tensor:
    """float32 [num_rows, vocab] -> int64 [num_rows], first index of the largest; NaN is the largest, as in torch."""
    assert logits.dtype == torch.float32
    rows, size = logits.shape
    places = torch.empty(rows, dtype=torch.int64)
    told = ctypes.c_int64(rows), ctypes.c_int64(size), torch.get_num_threads()
    library().argmax_rows(_place(logits), _place(places), *told)
    return places


def turn_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norm: tuple[Tensor, Tensor, float] | None,
    rotation: tuple[Tensor, Tensor],
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """As real.kernels.heads.turn_and_store, with a cache in the model's own format."""
    num_tokens, num_heads, head_dim = query.shape
    query_weight, key_weight, eps = norm or (None, None, 0.0)
    tensors = (query, key, value, *rotation, kv_cache, *(norm[:2] if norm else ()))
    assert {x.dtype for x in tensors} == {query.dtype}
    for heads in (query, key, value):
        assert heads.stride()[1:] == (head_dim, 1), "the heads of a token lie side by side"
    for whole in (*tensors[3:], slot_mapping):
        assert whole.is_contiguous()
    keys, values = kv_cache
    told = _Heads(
        query=query.data_ptr(), key=key.data_ptr(), key_cache=keys.data_ptr(), value_cache=values.data_ptr(),
        value=value.data_ptr(), query_weight=None if query_weight is None else query_weight.data_ptr(),
        key_weight=None if key_weight is None else key_weight.data_ptr(),
        cos=rotation[0].data_ptr(), sin=rotation[1].data_ptr(), slots=slot_mapping.data_ptr(),
        tokens=num_tokens, heads=num_heads, kv_heads=key.shape[1], dim=head_dim,
        query_stride=query.stride(0), key_stride=key.stride(0), value_stride=value.stride(0), eps=eps,
    )  # fmt: skip
    library().turn_and_store_heads(ctypes.byref(told), *_how(query))


def _place(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _how(x: Tensor) -> tuple[int, int]:
    """Returns (is_half, num_threads)."""
    return int(x.dtype == torch.bfloat16), torch.get_num_threads()
