"""The engine behind the Backend protocol: outcomes, forced rows, times, memory, and bad options."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from real import host_memory, max_load
from real.cache_engine import block_bytes
from real.config import RealConfig
from real.device import memory_named
from real.driver import Work
from real.runner import ModelRunner
from real.sampling import sampler
from testbed.core.interfaces import Backend
from testbed.core.plan import Preemption, PreemptionMode
from testbed.core.request import SamplingParams
from testbed.errors import ConfigError, DeviceError
from tests.real.engine_helpers import checkpoint, plan_of, row, tiny_backend, tiny_spec

PROMPTS = [[5, 9, 301, 44, 8, 77, 2], [13, 13, 250], [400 + i for i in range(12)]]


def generate(backend, prompts: list[list[int]], num_tokens: int, chunk: int) -> list[list[int]]:
    """Runs each sequence to `num_tokens` outputs; prompts come in chunks beside the others' decodes."""
    known = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    tables = [[i + len(prompts) * j for j in range(12)] for i in range(len(prompts))]
    while any(len(known[i]) < len(prompts[i]) + num_tokens for i in range(len(prompts))):
        rows = []
        for i, prompt in enumerate(prompts):
            if len(known[i]) == len(prompt) + num_tokens:
                continue
            end = min(computed[i] + chunk, len(known[i]))
            samples = end == len(known[i])
            rows.append(row(i, known[i], tables[i], start=computed[i], end=end, samples=samples))
            computed[i] = end
        outcomes = backend.start(plan_of(*rows)).wait().outcomes
        for outcome in outcomes or ():
            known[outcome.seq_id] += outcome.tokens
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]


def test_one_outcome_for_each_sampled_row_that_is_not_forced():
    backend: Backend[Work] = tiny_backend()
    rows = (
        row(4, PROMPTS[0], [0, 1], forced=True),
        row(7, PROMPTS[1], [2]),
        row(2, PROMPTS[2], [3, 4, 5], end=8, samples=False),
        row(1, PROMPTS[2], [6, 7, 8]),
    )
    outcomes, spans, _ = backend.start(plan_of(*rows)).wait()
    assert [outcome.seq_id for outcome in outcomes] == [7, 1]
    assert all(len(outcome.tokens) == 1 and outcome.stop is None for outcome in outcomes)
    assert spans.prepare_ns > 0
    assert spans.forward_ns > 0
    assert spans.sample_ns > 0
    assert spans.schedule_ns == 0  # the driver's to fill in


def test_forced_rows_are_sampled_and_their_tokens_left_out(monkeypatch):
    backend, shapes = tiny_backend(), []
    choose = sampler.choose
    monkeypatch.setattr(sampler, "choose", lambda logits, inputs: shapes.append(logits.shape) or choose(logits, inputs))
    rows = (row(0, PROMPTS[0], [0, 1], forced=True), row(1, PROMPTS[1], [2], forced=True))
    outcomes = backend.start(plan_of(*rows)).wait().outcomes
    assert outcomes is None
    assert shapes == [(2, 512)]


def test_a_step_without_samples_has_no_outcomes():
    assert tiny_backend().start(plan_of(row(0, PROMPTS[2], [0, 1], end=5, samples=False))).wait()[0] is None


def test_a_plan_without_rows_moves_blocks_only():
    backend = tiny_backend()
    backend.start(plan_of(row(0, PROMPTS[0], [3, 1]))).wait()
    kept = backend.cache.gpu.whole[1][:, 3].clone()
    preempted = (Preemption(0, "a", PreemptionMode.SWAP, 7),)
    outcomes, spans, _ = backend.start(plan_of(preempted=preempted, swap_out=((3, 5),))).wait()
    assert outcomes is None
    assert spans.forward_ns >= 0
    assert torch.equal(backend.cache.cpu[1][:, 5], kept)
    assert kept.abs().sum() > 0


def test_moves_go_out_then_in_then_copy():
    backend = tiny_backend(num_gpu_blocks=4, num_cpu_blocks=4)
    for layer in range(2):
        for block in range(4):
            backend.cache.gpu.whole[layer][:, block] = block + 1
            backend.cache.cpu[layer][:, block] = 10 * (block + 1)
    # block 0 goes out and is filled from outside in the same step; what came in is copied on
    backend.start(plan_of(swap_out=((0, 1), (3, 2)), swap_in=((3, 0), (1, 3)), copies=((0, 2), (3, 1)))).wait()
    for layer in range(2):
        assert backend.cache.gpu.whole[layer][0, :4, 0, 0, 0].tolist() == [40, 1, 40, 1]
        assert backend.cache.cpu[layer][1, :, 0, 0, 0].tolist() == [10, 1, 4, 40]


def test_a_plan_with_a_token_outside_the_vocabulary_is_our_own_mistake():
    """Traces, prompts and the configuration were checked before."""
    chunk = row(3, [1, 2], [0], samples=False, sampling=SamplingParams(prompt_logprobs=0))
    for outside in (512, -1):
        with pytest.raises(AssertionError, match="every token is in the model's vocabulary"):
            tiny_backend().start(plan_of(row(0, [1], [0]), row(3, [1, 2, 3, outside, 5], [1, 2], start=2)))
        with pytest.raises(AssertionError, match="every token is in the model's vocabulary"):  # only scored by now
            tiny_backend().start(plan_of(chunk.replace(num_prompt_tokens=3, history=(1, 2, outside))))


def test_blocks_on_the_cpu_come_from_the_stated_budget():
    size = block_bytes(tiny_spec(), 4, torch.float32)
    assert size == 4 * tiny_spec().kv_bytes_per_token()
    backend = tiny_backend(num_gpu_blocks=None, cpu_kv_bytes=5 * size + 1)
    assert backend.num_gpu_blocks == 5
    assert backend.num_cpu_blocks == 16
    assert sum(layer.nbytes for layer in backend.cache.gpu) == (5 + 1) * size  # and the scratch block
    assert tiny_backend(num_gpu_blocks=None, cpu_kv_bytes=5 * size, dtype="bfloat16").num_gpu_blocks == 10
    with pytest.raises(DeviceError, match=r"cpu_kv_bytes is 2,047, but one KV block of 4 tokens takes 2,048 bytes"):
        tiny_backend(num_gpu_blocks=None, cpu_kv_bytes=size - 1)


@pytest.mark.parametrize(
    ("limits", "prompts", "num_decodes"),
    [
        ({"max_model_len": 256}, (64,), 8),
        ({"max_model_len": 40}, (40, 24), 8),
        ({"max_model_len": 40, "max_num_seqs": 1}, (40,), 1),
    ],
)
def test_a_gpu_is_measured_at_the_maximum_load(monkeypatch, limits, prompts, num_decodes):
    """The measuring steps run here on the CPU; only the counters of GPU memory are made up."""
    counters = {
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 1000,  # weights
        "max_memory_allocated": 1700,  # with the temporaries of a step
        "memory_reserved": 1500,
        "mem_get_info": (98_000, 100_000),  # 500 bytes are neither free nor torch's
    }
    for name, value in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    backend, length = tiny_backend(**limits), limits["max_model_len"]
    loads = []
    compute = backend.runner.hidden_states

    def hidden_states(inputs, caches):
        loads.append(inputs.forward.attention)
        return compute(inputs, caches)

    monkeypatch.setattr(backend.runner, "hidden_states", hidden_states)
    assert max_load._measure(backend.runner, torch.float32) == (1000, 700 + 500)
    assert [load.query_lens for load in loads] == [prompts, (1,) * num_decodes]
    assert [load.context_lens for load in loads] == [(length,) * len(prompts), (length,) * num_decodes]


def test_kv_memory_starts_as_zeros_after_the_warm_up():
    assert all(layer.count_nonzero() == 0 for layer in tiny_backend().cache.gpu)


@pytest.mark.parametrize("place", ["warm-up", "a step"])
def test_memory_that_runs_out_later_is_one_line_too(monkeypatch, place):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmany lines")

    backend = tiny_backend()
    monkeypatch.setattr(ModelRunner, "draw", full)
    with pytest.raises(DeviceError, match=r"^out of GPU memory; lower cache\.num_gpu_blocks .*$") as error:
        tiny_backend() if place == "warm-up" else backend.start(plan_of(row(0, [1, 2], [0]))).wait()
    assert "\n" not in str(error.value)


def test_an_error_after_another_is_one_of_memory_only_if_one_of_them_is():
    error = RuntimeError("a shape")
    for first, message in ((KeyError("no key"), "^a shape$"), (torch.OutOfMemoryError(), "^out of GPU memory; less$")):
        error.__context__ = first
        with pytest.raises((RuntimeError, DeviceError), match=message), memory_named("less"):
            raise error


def test_more_blocks_than_memory_is_one_line():
    with pytest.raises(DeviceError, match=r"no memory for \d+ KV blocks on cpu") as error:
        tiny_backend(num_gpu_blocks=10**12)
    assert "\n" not in str(error.value)


def test_weights_and_blocks_that_do_not_fit_in_host_memory_are_refused_before_they_are_allocated(monkeypatch):
    weights = tiny_spec().num_parameters * 4
    block = block_bytes(tiny_spec(), 4, torch.float32)
    needed = weights + 64 * block + host_memory.RESERVE_BYTES
    monkeypatch.setattr(host_memory, "available_bytes", lambda: needed)
    tiny_backend(num_cpu_blocks=10**5)  # swap space is taken when it is first written
    monkeypatch.setattr(host_memory, "available_bytes", lambda: needed - 1)
    with pytest.raises(DeviceError, match="no memory for 64 KV blocks on cpu, 2,048 bytes each, beside the weights"):
        tiny_backend()
    monkeypatch.setattr(host_memory, "available_bytes", lambda: weights)
    with pytest.raises(DeviceError, match=rf"the weights of tiny-test \({weights:,} bytes\) do not fit in the"):
        tiny_backend()


def test_more_sequences_than_memory_for_their_block_tables_are_refused_before_it_is_allocated(monkeypatch):
    max_blocks = 256 // 4
    needed = 1000 * (2 * 4 * max_blocks + host_memory.TABLE_BYTES) + host_memory.RESERVE_BYTES
    monkeypatch.setattr(host_memory, "available_bytes", lambda: needed)
    tiny_backend(max_num_seqs=1000)
    told = r"^scheduler\.max_num_seqs is 1001: the block tables of as many sequences take 640,640 bytes, .*; lower it$"
    with pytest.raises(DeviceError, match=told):
        tiny_backend(max_num_seqs=1001)


def test_replicas_whose_processes_alone_do_not_fit_in_host_memory_are_refused(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * host_memory.PROCESS_BYTES - 1)
    with pytest.raises(DeviceError, match=r"^backend\.num_replicas is 3: their processes alone take [\d,]+ bytes, and"):
        host_memory.check_fits("tiny", 0, 0, 0, num_replicas=3)


def test_available_memory_is_read_where_the_system_tells_it(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    assert host_memory.available_bytes() is None
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    7 kB\n")
    assert host_memory.available_bytes() == 7 * 1024


@pytest.mark.parametrize(("line", "folder", "names"), [
    ("0::/job/step\n", "", ("memory.max", "memory.current", "inactive_file")),
    ("3:cpu:/\n4:memory:/job/step\n", "memory",
     ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
])  # fmt: skip
def test_available_memory_is_what_the_tightest_limit_of_a_container_or_job_leaves(
    monkeypatch, tmp_path, line, folder, names
):
    def limit(group: str, bound: str, used: int, reclaimable: int) -> None:
        (tmp_path / folder / group).mkdir(parents=True, exist_ok=True)
        told = bound, str(used), f"anon 5\n{names[2]} {reclaimable}\n"
        for name, text in zip((*names[:2], "memory.stat"), told, strict=True):
            (tmp_path / folder / group / name).write_text(text)

    for name, text in (("MEMINFO", "MemAvailable: 9 kB\n"), ("CGROUPS", line)):
        monkeypatch.setattr(host_memory, name, tmp_path / name)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_memory, "CGROUP_ROOT", tmp_path)
    limit("job", "max\n", 10, 0)
    assert host_memory.available_bytes() == 9 * 1024
    limit("job/step", "6000\n", 1500, 500)
    assert host_memory.available_bytes() == 5000
    limit("job", "4000\n", 1000, 100)
    assert host_memory.available_bytes() == 3100


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_demanded_and_absent():
    with pytest.raises(DeviceError, match=r"backend\.device=cuda, but torch finds no CUDA GPU"):
        tiny_backend(device="cuda")


@pytest.mark.parametrize(
    "options",
    [{"device": "tpu"}, {"dtype": "float8"}, {"attention": "xformers"}, {"max_captured_tokens": -1},
     {"load_format": "gguf"}, {"pace": "fast"}, {"cpu_kv_bytes": 0}, {"num_threads": 0}, {"num_threads": 100_000}],
)  # fmt: skip
def test_bad_options_are_named(options):
    (key,) = options
    with pytest.raises(ConfigError, match=f"backend.{key} is "):
        RealConfig(**options)


def test_bad_sizes_are_named():
    for options in ({"block_size": 0}, {"num_gpu_blocks": 0}, {"num_cpu_blocks": -1}, {"max_num_seqs": 0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            tiny_backend(**options)


def test_it_says_what_it_runs_on():
    backend = tiny_backend()
    assert backend.attention_name in ("cpu", "torch")
    assert re.search(r", (1 thread|\d+ threads)$", backend.device_description)


def test_importing_the_package_or_its_driver_needs_no_torch_and_no_simulator():
    code = (
        "import sys, real, real.config, real.driver; assert not {'torch', 'simpy', 'sim', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


NEEDS_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_sequence_whose_blocks_another_took_meanwhile_goes_on_from_the_host(device, tmp_path):
    spec = checkpoint(tmp_path, tiny_spec())  # dummy weights are drawn on the device, and differ
    backend = tiny_backend(spec, device=device)

    def computed(table: list[int]) -> torch.Tensor:
        """Keys and values of the first 13 positions."""
        return backend.cache.gpu.whole[:, :, table].flatten(2, 3)[:, :, :13].clone()

    known, table = list(PROMPTS[2]), [0, 1, 2, 20]  # 12 tokens, 3 blocks
    expected = generate(tiny_backend(spec), [known], 6, 64)[0]
    for step in range(6):
        swap_in = ()
        if step == 2:
            kept = computed(table)
            other = row(1, [7] * 16, [0, 1, 2, 20])
            backend.start(plan_of(other, swap_out=((0, 5), (1, 15), (2, 0), (20, 3)))).wait()
            assert not torch.equal(computed(table), kept)
            swap_in, table = ((5, 11), (15, 3), (0, 1), (3, 2)), [11, 3, 1, 2]
        start = 0 if step == 0 else len(known) - 1
        work = backend.start(plan_of(row(0, known, [*table, 21], start=start), swap_in=swap_in))
        (outcome,) = work.wait().outcomes
        known += outcome.tokens
    assert torch.equal(computed(table), kept)
    assert known[len(PROMPTS[2]) :] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_memory_is_measured_and_tokens_are_those_of_the_cpu(tmp_path):
    spec = checkpoint(tmp_path, tiny_spec())
    backend = tiny_backend(spec, device="cuda", num_gpu_blocks=None, gpu_memory_utilization=0.5)
    _, total = torch.cuda.mem_get_info()
    size = block_bytes(spec, 4, torch.float32)
    assert 0.2 * total < backend.num_gpu_blocks * size < 0.5 * total
    assert generate(backend, PROMPTS, 5, 64) == generate(tiny_backend(spec), PROMPTS, 5, 64)
