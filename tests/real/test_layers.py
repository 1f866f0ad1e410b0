"""A linear layer is one function of its input, however the product is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from real.layers import linear, packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 65])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_room", [True, False])
def test_products_are_those_of_float64_however_the_weight_lies(monkeypatch, dtype, num_tokens, has_bias, has_room):
    monkeypatch.setattr(packed, "available_bytes", lambda: None if has_room else 1)
    generator = torch.Generator().manual_seed(num_tokens)
    x, weight = (torch.randn(n, 48, generator=generator).to(dtype) for n in (num_tokens, 40))
    bias = torch.randn(40, generator=generator).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    parameter = nn.Parameter(weight, requires_grad=False)
    assert (packed.packed(parameter) is not None) is (has_room and packed.is_known_to_onednn(dtype))
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    product = linear.multiply(x, parameter, bias)
    torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=0)
    assert product.is_contiguous()


def test_numbers_of_rows_share_code_at_the_cost_of_a_sixteenth():
    buckets = {number: packed._bucket(number) for number in range(1, 4097)}
    assert all(number <= bucket <= number * 17 / 16 for number, bucket in buckets.items())
    assert len(set(buckets.values())) == 31 + 7 * 16 + 1


def test_a_cpu_without_bfloat16_multiplies_as_torch_does(monkeypatch):
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)
    for dtype, is_laid_out in ((torch.bfloat16, False), (torch.float32, True)):
        parameter = nn.Parameter(torch.ones(4, 8, dtype=dtype), requires_grad=False)
        assert (packed.packed(parameter) is not None) is is_laid_out
        assert linear.multiply(torch.ones(2, 8, dtype=dtype), parameter).eq(8).all()


def test_a_weight_that_is_written_to_is_laid_out_again():
    parameter = nn.Parameter(torch.ones(4, 8), requires_grad=False)
    x = torch.ones(2, 8)
    assert linear.multiply(x, parameter).eq(8).all()
    parameter.mul_(2)
    assert linear.multiply(x, parameter).eq(16).all()


def test_what_is_made_for_one_product_is_not_laid_out():
    weight = torch.ones(4, 8)
    assert packed.packed(weight) is None
    assert linear.multiply(torch.ones(2, 8), weight).eq(8).all()


def test_layers_that_share_a_weight_share_its_layout():
    parameter = nn.Parameter(torch.ones(4, 8), requires_grad=False)
    assert packed.packed(parameter) is packed.packed(parameter)
