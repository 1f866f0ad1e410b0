"""Which attention provider an engine takes, why not the others, and what a first step finds out."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from real import kernels
from real.attention import first_step, flash3_provider, flash_provider, triton_provider, varlen_provider
from real.attention.flash_provider import why_not
from real.attention.flash_step import ALL, FlashProvider, Options, StepPart
from real.attention.registry import PROVIDERS, Choice, Entry, choose_attention, choose_together
from real.attention.torch_provider import TorchAttention
from real.config import ATTENTION_NAMES
from testbed.errors import ConfigError
from tests.kernels.paged_batches import Batch, make_spec
from tests.real.engine_helpers import tiny_backend
from tests.real.fake_flash import FakeVarlen

HALF = {"device": torch.device("cuda"), "dtype": torch.float16}


@pytest.mark.usefixtures("flash", "no_triton", "ampere")
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(), "needs CUDA"),
        (make_spec(device=torch.device("cuda")), "dtype is float32"),
        (make_spec(**HALF, block_size=256, head_dim=320), "head size"),
        (make_spec(**HALF, block_size=256), None),
        (make_spec(**HALF, block_size=16), "block_size is 16, no multiple of 256.*no Triton here"),
        (make_spec(**HALF, block_size=256, kv_dtype="fp8_e5m2"), "reads no fp8_e5m2 cache.*no Triton here"),
    ],
)
def test_flash_attention_says_why_it_cannot_run(spec, reason):
    assert why_not(spec) is None if reason is None else re.search(reason, why_not(spec))


@pytest.mark.usefixtures("flash", "no_triton", "ampere")
def test_flash_attention_needs_an_ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not(make_spec(**HALF, block_size=256)) == "it needs compute capability 8.0 or later, the GPU's is 7.5"


@pytest.mark.usefixtures("flash", "ampere")
def test_flash_attention_is_able_at_any_block_size_where_the_kernels_are(monkeypatch):
    monkeypatch.setattr(triton_provider, "why_not", lambda spec: None)
    assert why_not(make_spec(**HALF, block_size=16)) is None
    assert why_not(make_spec(**HALF, block_size=16, kv_dtype="fp8_e4m3")) is None


@pytest.mark.usefixtures("flash3", "ampere")
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(device=torch.device("cuda")), "dtype is float32"),
        (make_spec(**HALF), "needs compute capability 9.0, the GPU's is 8.0"),
        (make_spec(**HALF, kv_dtype="fp8_e4m3"), "beside a cache in fp8_e4m3"),
        (make_spec(**HALF, alibi=True), "has no ALiBi"),
        (make_spec(**HALF, window=7), None),
    ],
)
def test_flash_attention_3_says_why_it_cannot_run(monkeypatch, spec, reason):
    if reason is None or "capability" not in reason:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = flash3_provider.why_not(spec)
    assert found is None if reason is None else reason in found


@pytest.fixture
def with_flash_in_torch(monkeypatch):
    """As torch 2.13 has it, whichever is installed."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", FakeVarlen())


@pytest.mark.usefixtures("with_flash_in_torch", "ampere")
@pytest.mark.parametrize(
    ("spec", "triton", "reason"),
    [
        (make_spec(), None, "needs CUDA"),
        (make_spec(**HALF, head_dim=12), None, "multiple of 8"),
        (make_spec(**HALF, alibi=True), None, "no ALiBi"),
        (make_spec(**HALF), "no compiler", "would take its decodes, and: no compiler"),
        (make_spec(**HALF, window=5, kv_dtype="fp8_e5m2"), None, None),
    ],
)
def test_torchs_own_flash_attention_says_why_it_cannot_run(monkeypatch, spec, triton, reason):
    monkeypatch.setattr(triton_provider, "why_not", lambda spec: triton)
    found = varlen_provider.why_not(spec)
    assert found is None if reason is None else reason in found
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert reason is not None or "without FlashAttention" in varlen_provider.why_not(spec)


@pytest.mark.usefixtures("with_flash_in_torch", "ampere")
def test_an_older_torch_whose_varlen_lacks_what_is_asked_for_is_named(monkeypatch):
    module = FakeVarlen()
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    monkeypatch.setattr(module, "varlen_attn", lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale: 0)
    assert "takes no window_size; install torch 2.13" in varlen_provider.why_not(make_spec(**HALF))


@pytest.mark.parametrize("is_paged", [False, True])
def test_the_stand_in_for_torchs_varlen_has_its_parameters(is_paged):
    """And torch takes the arguments of ours, as far as it looks at them before there is a GPU."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not set(varlen_provider.ASKED) <= set(inspect.signature(varlen.varlen_attn).parameters):
        pytest.skip("this torch's takes less than ours asks for")
    ours, torchs = (list(inspect.signature(one.varlen_attn).parameters) for one in (FakeVarlen(), varlen))
    assert ours == torchs
    batch = Batch(make_spec(block_size=256), [(5, 7), (300, 9)], seed=1).to(torch.device("meta"))
    known = batch.metadata
    part = StepPart(
        ALL, known.query_starts, known.context_starts, 9, 309, known.context_lens_tensor, known.block_tables
    )  # fmt: skip
    keys, values = batch.kv_cache if is_paged else (batch.key, batch.value)
    options = Options(0.3, (-1, 0), None)
    output = varlen_provider._varlen(part, batch.query, keys, values, options, is_paged=is_paged)
    assert output.shape == batch.query.shape


def chosen_by_auto(spec, monkeypatch) -> Choice:
    """Providers are made without a GPU, onto which they put what they know beforehand."""
    make_without_gpu(monkeypatch)
    monkeypatch.setattr(first_step, "why_it_fails", lambda provider, spec: None)
    return choose_attention("auto", spec)


def make_without_gpu(monkeypatch) -> None:
    for provider in (TorchAttention, triton_provider.TritonAttention):
        monkeypatch.setattr(provider, "__init__", lambda self, spec: None)
    monkeypatch.setattr(FlashProvider, "__init__", lambda self, name, *_: setattr(self, "name", name))


@pytest.mark.usefixtures("ampere", "no_triton")
@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_a_flash_attention_that_was_built_for_another_torch_is_passed_over(monkeypatch, tmp_path, error):
    (tmp_path / "flash_attn.py").write_text(f"raise {error}('flash_attn_2_cuda.so: undefined\\n  symbol: _ZN3c104')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(kernels, "why_not", lambda device: "no Triton here")
    choice = chosen_by_auto(make_spec(**HALF, block_size=256), monkeypatch)
    assert choice.provider.name == "torch"
    assert choice.reasons["flash_attn"] == (
        f"the installed flash-attn cannot be imported ({error}: flash_attn_2_cuda.so: undefined symbol: _ZN3c104); "
        "install it for this torch"
    )


def test_auto_takes_the_first_provider_that_can_run_and_says_why_not_the_others():
    assert ("auto", *PROVIDERS) == ATTENTION_NAMES
    choice = choose_attention("auto", make_spec())
    assert choice.provider.name == "torch"
    assert choice.reasons == {
        "flash_attn_3": "it needs CUDA, the device is cpu",
        "flash_attn": "it needs CUDA, the device is cpu",
        "varlen": "it needs CUDA, the device is cpu",
        "triton": "it needs CUDA, the device is cpu",
        "cpu": "head size 8 is no multiple of 16",
        "torch": "first that can run",
    }


@pytest.mark.parametrize(
    ("name", "why"), [(name, "it needs CUDA") for name in ("flash_attn_3", "flash_attn", "varlen", "triton")]
)
def test_a_provider_that_cannot_run_is_refused_with_reason_and_alternative(name, why):
    with pytest.raises(ConfigError, match=f"attention={name} cannot run here: .*{why}.*can run: auto, .*torch"):
        tiny_backend(attention=name)


class Wrong:
    """A provider whose outputs are the reference's, changed, or which raises."""

    name, supports_graphs = "wrong", False

    def __init__(self, spec, change) -> None:
        self._inner, self._change = TorchAttention(spec), change

    def prepare(self, metadata):
        step = self._inner.prepare(metadata)
        return lambda *inputs: self._change(step(*inputs))


def fail(output):
    raise RuntimeError("no kernel image is available\n  for execution on the device")


def spoil_the_last_row(output):
    output[-1, -1] = 0.0
    return output


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 30}, {"alibi": True}, {"kv_dtype": "fp8_e4m3", "scales": (0.02, 40.0)}, {"dtype": torch.bfloat16}],
    ids=str,
)
@pytest.mark.usefixtures("flash")
def test_a_first_step_that_is_right_is_no_reason_against_a_provider(options):
    spec = make_spec(head_dim=16, block_size=256, **options)
    for provider in (
        (TorchAttention(spec), flash_provider.create(spec)) if "kv_dtype" not in options else [TorchAttention(spec)]
    ):
        assert first_step.why_it_fails(provider, spec) is None
    spoiled = first_step.why_it_fails(Wrong(spec, spoil_the_last_row), spec)
    assert re.match("its output of a first small step is .* off the reference's", spoiled)
    unknown = first_step.why_it_fails(Wrong(spec, lambda output: output * float("nan")), spec)
    assert "is nan off" in unknown


def old_decode(q, k_cache, v_cache, cache_seqlens, softmax_scale, causal): ...


def test_a_flash_attention_that_lacks_what_is_asked_for_fails_at_a_first_step(flash, monkeypatch):
    monkeypatch.setattr(flash, "flash_attn_with_kvcache", old_decode)
    spec = make_spec(head_dim=16, block_size=256)
    reason = first_step.why_it_fails(flash_provider.create(spec), spec)
    assert re.match(
        r"it failed at a first small step \(TypeError: .* got an unexpected keyword argument '\w+'\)", reason
    )


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.02, 1e-4)])
@pytest.mark.parametrize("rows", [4, 2])
def test_a_first_step_that_leaves_out_keys_of_one_row_is_found(scales, rows):
    """Of the longest row alone, in the mixed step or in that of decodes, however small the output is."""
    spec = make_spec(head_dim=16, block_size=256, kv_dtype="fp8_e4m3", scales=scales)

    class Forgetful(TorchAttention):
        def prepare(self, metadata):
            if len(metadata.context_lens) == rows:
                lens = [*metadata.context_lens[:-1], metadata.context_lens[-1] * 3 // 4]
                starts = torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)
                lengths = torch.tensor(lens, dtype=torch.int32)
                metadata = replace(
                    metadata, context_lens=tuple(lens), context_starts=starts, context_lens_tensor=lengths
                )
            return super().prepare(metadata)

    assert "off the reference's" in first_step.why_it_fails(Forgetful(spec), spec)
    assert first_step.why_it_fails(TorchAttention(spec), spec) is None


def test_our_own_mistakes_are_no_reason_against_a_provider():
    def mistake(output):
        raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours"):
        first_step.why_it_fails(Wrong(make_spec(), mistake), make_spec())


@pytest.mark.usefixtures("flash", "ampere", "with_flash_in_torch")
def test_ranks_take_the_provider_that_all_of_them_can_run(monkeypatch):
    monkeypatch.setattr(kernels, "why_not", lambda device: None)
    monkeypatch.setattr(first_step, "why_it_fails", lambda provider, spec: None)
    make_without_gpu(monkeypatch)
    spec, names = make_spec(**HALF, block_size=256), list(PROVIDERS)
    alone = choose_attention("auto", spec).provider.name
    assert choose_together("auto", spec, lambda index: index).provider.name == alone != names[-1]
    for other in [names.index(name) for name in (*names[names.index(alone) : names.index("cpu")], "torch")]:
        assert choose_together("auto", spec, lambda index, other=other: max(index, other)).provider.name == names[other]


def test_a_first_step_that_fails_is_told_in_a_line():
    spec = make_spec()
    assert first_step.why_it_fails(Wrong(spec, fail), spec) == (
        "it failed at a first small step (RuntimeError: no kernel image is available for execution on the device)"
    )


def test_a_provider_of_ones_own_that_is_wrong_is_refused_on_a_cpu_too(monkeypatch):
    for change, why in ((spoil_the_last_row, "its output of a first small step is"), (fail, "RuntimeError: no kernel")):
        monkeypatch.setitem(PROVIDERS, "wrong", Entry(lambda spec: None, partial(Wrong, change=change)))
        with pytest.raises(ConfigError, match=f"attention=wrong cannot run here: .*{why}.*can run: auto, .*torch"):
            choose_attention("wrong", make_spec())
    monkeypatch.setitem(PROVIDERS, "wrong", Entry(lambda spec: None, partial(Wrong, change=torch.clone)))
    assert choose_attention("wrong", make_spec()).provider.name == "wrong"


@pytest.mark.usefixtures("flash", "ampere", "with_flash_in_torch")
@pytest.mark.parametrize(
    ("failing", "chosen"),
    [
        (["flash_attn"], "varlen"),
        (["flash_attn", "varlen"], "triton"),
        (["triton"], "flash_attn"),
        (["flash_attn", "varlen", "triton"], "torch"),
    ],
)
def test_on_a_gpu_auto_passes_over_what_fails_at_its_first_step(monkeypatch, failing, chosen):
    monkeypatch.setattr(kernels, "why_not", lambda device: None)
    make_without_gpu(monkeypatch)
    monkeypatch.setattr(
        first_step, "why_it_fails", lambda provider, spec: "it failed" if provider.name in failing else None
    )
    spec = make_spec(**HALF, block_size=256)
    choice = choose_attention("auto", spec)
    assert choice.provider.name == chosen
    before = f"attention={chosen} is taken; before it in the order: flash_attn_3 (it needs compute"
    assert choice.passed_over.startswith(before)
    failed = "".join(f", {name} (it failed)" for name in failing if chosen != "flash_attn")
    assert choice.passed_over.endswith(failed + ", cpu (it is for CPUs, the device is cuda)" * (chosen == "torch"))
    assert "\n" not in choice.passed_over
    for name in failing:
        with pytest.raises(ConfigError, match=f"attention={name} cannot run here: it failed; can run: auto, "):
            choose_attention(name, spec)
