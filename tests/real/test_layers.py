"""A linear layer is one function of its input, however the product is taken."""

from __future__ import annotations

import pytest
import torch

from real.layers import linear


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 2, 17, linear.MAX_FEW_TOKENS, linear.MAX_FEW_TOKENS + 1])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_are_those_of_float64_on_any_number_of_threads(monkeypatch, num_threads, num_tokens, has_bias):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    generator = torch.Generator().manual_seed(num_tokens)
    x, weight = torch.randn(num_tokens, 48, generator=generator), torch.randn(40, 48, generator=generator)
    bias = torch.randn(40, generator=generator) if has_bias else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    product = linear.multiply(x, weight, bias)
    torch.testing.assert_close(product.double(), expected, atol=1e-4, rtol=0)
    assert product.is_contiguous()
