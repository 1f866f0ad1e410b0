"""What the public functions hand to Triton, without a GPU: its own binder takes the arguments of every launch, and
compiles what a launch would need. Nothing runs."""

from __future__ import annotations

import random
import re
from importlib.util import find_spec

import pytest
import torch

from real.config import EngineOptions
from real.max_load import warm_up_loads
from testbed.specs.model import ExpertsShape
from tests.kernels.compile import between, draw, experts, few_tokens, heads, on_no_gpu, step
from tests.kernels.paged_batches import make_spec

SETTLED = "mov.b32"  # see formats.py
STARTS_NEXT, WAITS = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
TOUCHES = r"tt\.(load|store|atomic|descriptor)|async_copy_global|cf\.cond_br|scf\.if"  # memory; or a way around a wait
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


class Launches:
    """Compiled kernels, by name, and the grids that were asked for."""

    def __init__(self) -> None:
        self.kernels: dict[str, set[int]] = {}
        self.pending: dict[str, list[int]] = {}  # loads left under way by waits in loops of products
        self.grids: list[tuple[str, tuple[int, ...]]] = []
        self.code: dict[str, str] = {}  # Triton's own, with layouts, of all kernels of a name
        self.starts: dict[str, set[tuple[bool, bool]]] = {}  # (starts early, waits before it touches memory)

    @property
    def num_kernels(self) -> int:
        return sum(map(len, self.kernels.values()))

    def take(self, names: str = "") -> list[tuple[str, tuple[int, ...]]]:
        taken, self.grids = self.grids, []
        return [(name, grid) for name, grid in taken if names in name]


@pytest.fixture(params=[90], ids=["sm_90"])
def launches(request, monkeypatch, tmp_path):
    from triton.backends.nvidia.compiler import CUDABackend

    found, target = Launches(), request.param
    add_stages = CUDABackend.add_stages

    def add_first_stages(self, stages, *options):
        """As far as what is read here. The rest takes most of the time, and is the task of test_compile."""
        add_stages(self, stages, *options)
        del stages["llir"], stages["ptx"]
        stages["cubin"] = lambda _, metadata: metadata.update(name="", shared=0) or b""

    def launch(self, grid):
        def run(*args, **kwargs):
            kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
            found.kernels.setdefault(self.__name__, set()).add(id(kernel))
            for _, loop in re.findall(r"^( *)%\S* = scf\.for(.*?)^\1}", kernel.asm["ttgir"], re.DOTALL | re.MULTILINE):
                waits = re.findall(r"async_wait .*?num = (\d+)", loop)
                if re.search(r"= (tt\.dot|ttng\.warp_group_dot) ", loop):
                    found.pending.setdefault(self.__name__, []).append(min(map(int, waits), default=0))
            found.grids.append((self.__name__, grid))
            code = kernel.asm["ttgir"]
            found.code[self.__name__] = found.code.get(self.__name__, "") + code
            before = re.split(TOUCHES, code, maxsplit=1)[0]
            found.starts.setdefault(self.__name__, set()).add((kwargs.get("launch_pdl", False), WAITS in before))
            assert before.count(STARTS_NEXT) == code.count(WAITS) == before.count(WAITS), "only what waits, and once"

        return run

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CUDABackend, "add_stages", add_first_stages)
    on_no_gpu(monkeypatch, target, launch, f"to launch on {target}")
    return found


def test_after_the_warm_up_no_number_of_tokens_needs_another_kernel(launches):
    """For weights and experts, in steps that are not captured."""

    def run(num_tokens: int) -> None:
        for is_fp8 in (True, False):
            few_tokens(num_tokens, is_fp8)[1]()
        experts(num_tokens, "bf16", num=128)[1]()

    for load in warm_up_loads(EngineOptions(16, 8192, 100, 1000), is_cuda=True, experts=ExpertsShape(128, 8, 768)):
        assert max(num for num, _ in load) <= 1000
        run(sum(num for num, _ in load))
    num_kernels = launches.num_kernels
    for num_tokens in (1, 2, 5, 15, 16, 17, 31, 32, 48, 63, 64, 65, 300, 1000, 1024, 1025, 8192):
        run(num_tokens)
    assert launches.num_kernels == num_kernels


@pytest.mark.parametrize("launches", [90, 80], indirect=True, ids=str)
def test_fp8_weights_are_loaded_ahead_whatever_part_a_program_has(launches):
    """Single bytes cannot be: Triton must see that a part begins at a multiple of 16."""
    for num_tokens in (16, 32, 64):
        few_tokens(num_tokens, is_fp8=True)[1]()
    assert min(launches.pending["multiply_kernel"]) >= 4  # two turns of x and of the weight


def test_plain_weights_are_loaded_ahead_and_multiplied_from_shared_memory(launches):
    few_tokens(1, is_fp8=False)[1]()
    assert min(launches.pending["multiply_kernel"]) >= 2  # a turn of x and of the weight
    assert "ttng.warp_group_dot" in launches.code["multiply_kernel"]
    assert "ttg.local_load" not in launches.code["multiply_kernel"]


@pytest.mark.parametrize(("launches", "is_fp8"), [(90, True), (90, False), (80, True)], indirect=["launches"], ids=str)
def test_the_last_of_a_split_gemm_sees_what_all_have_stored(launches, is_fp8):
    """The interpreter runs one program after the other; on a GPU sums are seen because of three things."""
    few_tokens(16, is_fp8)[1]()
    ordered = r"tt\.store .*\n *(ttg\.barrier all|gpu\.barrier) .*\n.* tt\.atomic_rmw add, acq_rel, gpu,"
    assert len(re.findall(ordered, launches.code["multiply_kernel"])) == 1
    assert len(re.findall(r"tt\.load .* cacheModifier = cg ", launches.code["multiply_kernel"])) == 1


def test_a_gemm_of_few_tokens_has_programs_for_all_multiprocessors(launches):
    """Of 132. In bfloat16 one program each, whose loads take most of the shared memory; in FP8 several."""
    grids = {(16, False): [(64, 2), (384, 1)], (16, True): [(64, 8), (384, 1)], (32, False): [(64, 2), (384, 1)],
             (32, True): [(64, 6), (384, 1)], (64, False): [], (64, True): [(32, 8), (192, 1)]}  # fmt: skip
    for (num_tokens, is_fp8), expected in grids.items():
        few_tokens(num_tokens, is_fp8)[1]()
        assert [grid for _, grid in launches.take("multiply_kernel")] == expected


CHAINED = {f"{name}_kernel" for name in (
    "decode", "reduce", "multiply", "norm", "silu", "heads", "choose", "routes", "gate_up", "down", "sum"
)}  # fmt: skip


@pytest.mark.parametrize(("launches", "can"), [(90, True), (120, True), (80, False)], indirect=["launches"], ids=str)
def test_what_starts_early_waits_before_it_touches_memory(launches, can):
    """Kernels of a decode step, where a GPU can start them while the one before ends; and none else."""
    step(make_spec(1, 4, 128, 16, torch.bfloat16), [(300, 1)])
    step(make_spec(1, 4, 128, 16, torch.bfloat16), [(300, 1), (0, 40)])
    for is_fp8 in (True, False):
        few_tokens(1, is_fp8)[1]()
        heads(is_fp8, torch.float8_e4m3fn if is_fp8 else torch.bfloat16)[1]()
        experts(1, "bf16 e4m3" if is_fp8 else "bf16", num=128)[1]()
    between()
    assert set(launches.starts) > CHAINED
    for name, starts in launches.starts.items():
        assert starts == {(can and name in CHAINED,) * 2}, name


@pytest.mark.parametrize(
    ("launches", "group", "kv_dtype", "window"),
    [(90, 4, "auto", None), (90, 16, "auto", None), (80, 1, "fp8_e4m3", 50)], indirect=["launches"], ids=str,
)  # fmt: skip
def test_after_the_warm_up_no_step_needs_another_kernel(launches, group, kv_dtype, window):
    """Or serving would stop for a compilation when a longer row, or another number of parts, comes along."""
    spec = make_spec(2, group, 64, 16, torch.bfloat16, kv_dtype=kv_dtype, window=window, scales=(0.1, 0.2))
    for load in warm_up_loads(EngineOptions(16, 512, 300, 2048), is_cuda=True):
        step(spec, [(context - num, num) for num, context in load])
    known = launches.num_kernels
    rng = random.Random(0)
    for _ in range(20):
        rows = [(rng.randrange(800), rng.choice([1, 1, 1, 2, 17, 100])) for _ in range(rng.randint(1, 9))]
        step(spec, rows)
        step(spec, [(before, 1) for before, _ in rows])
    step(spec, [(20, 1)] * 300 + [(5000, 1)])
    assert launches.num_kernels == known
    num_parted = 0 if window else 2  # for a window of 50 keys parts are not worth it
    expected = {"store_kernel": 1, "tiles_kernel": 2, "prefill_kernel": 2, "decode_kernel": 2 + num_parted}
    if num_parted:
        expected |= {"plan_kernel": num_parted, "reduce_kernel": num_parted}
    assert {name: len(kernels) for name, kernels in launches.kernels.items()} == expected


def test_a_step_launches_what_its_rows_need(launches):
    spec = make_spec(2, 4, 64, 16, torch.bfloat16)
    step(spec, [(500, 1)])  # 501 keys are at most 4 parts
    assert launches.take() == [
        ("plan_kernel", (1,)),
        ("store_kernel", (1, 1)),
        ("decode_kernel", (4, 2)),
        ("reduce_kernel", (1, 8)),
    ]
    step(spec, [(0, 100)])  # tiles of 32 query tokens with 4 heads each
    assert launches.take() == [("tiles_kernel", (1,)), ("store_kernel", (100, 1)), ("prefill_kernel", (4, 2))]
    step(spec, [(30, 1), (0, 15), (17, 16), (60, 1)])  # of 16: no row is longer
    assert launches.take() == [
        ("tiles_kernel", (4,)),
        ("store_kernel", (33, 1)),
        ("decode_kernel", (4, 2)),
        ("prefill_kernel", (2, 2)),
    ]
    step(spec, [(300, 1)] * 200)  # whole: there are programs enough, and none is long
    assert launches.take("decode_kernel") == [("decode_kernel", (200, 2))]
    step(spec, [(300, 1)] * 199 + [(5000, 1)])  # one is: 264 parts would fill 132 multiprocessors with 4 programs each
    assert launches.take("decode_kernel") == [("decode_kernel", (200 + 264, 2))]


@pytest.mark.parametrize(
    ("launches", "head_dim", "options"),
    [
        (90, 128, {}),
        (90, 256, {}),
        (90, 64, {"kv_dtype": "fp8_e5m2"}),
        (80, 128, {"window": 50}),
        (80, 64, {"kv_dtype": "fp8_e4m3", "alibi": True}),
    ],
    indirect=["launches"],
    ids=str,
)
def test_while_a_tile_is_computed_the_next_is_loaded(launches, head_dim, options):
    """Keys lie where a table says, so they wait for its loads: with too few stages Triton waits for all in each turn
    of a loop, and the multiprocessor for the memory."""
    spec = make_spec(1, 4, head_dim, 16, torch.bfloat16, **options)
    step(spec, [(0, 40), (300, 1)])
    step(spec, [(0, 7)])
    loops = launches.pending["prefill_kernel"]
    assert len(loops) == 2 * (3 if spec.sliding_window else 2)
    assert min(loops) >= 2
    if head_dim <= 128:
        assert min(launches.pending["decode_kernel"]) >= 2


@pytest.mark.parametrize(
    ("launches", "kv_dtype"),
    [(90, "fp8_e4m3"), (90, "fp8_e5m2"), (80, "fp8_e4m3"), (89, "fp8_e4m3"), (120, "fp8_e4m3")],
    indirect=["launches"],
    ids=str,
)
def test_fp8_is_converted_before_the_layout_of_the_tensor_cores(launches, kv_dtype):
    """In that layout it would be read byte by byte; and only float32 is rounded to bfloat16 in pairs."""
    step(make_spec(1, 4, 128, 16, torch.bfloat16, kv_dtype=kv_dtype), [(0, 40), (300, 1)])
    experts(64, "bf16 e4m3")[1]()
    for name in ("decode_kernel", "prefill_kernel", "gate_up_kernel", "down_kernel"):
        code = launches.code[name]
        assert re.search(r"x(f8E4M3FN|f8E5M2|i8), #", code), name
        assert not re.search(r"x(f8E4M3FN|f8E5M2|i8), #ttg\.dot_op", code), name
        assert not re.search(r"tt\.fp_to_fp .*x(f8E4M3FN|f8E5M2), .* -> .*xbf16", code), name


@pytest.mark.parametrize("launches", [100], indirect=True, ids=str)
def test_where_triton_cannot_pipeline_what_is_settled_nothing_is(launches):
    """It would end the compilation."""
    step(make_spec(1, 4, 64, 16, torch.bfloat16, kv_dtype="fp8_e4m3"), [(0, 40), (300, 1)])
    experts(64, "bf16 e4m3")[1]()
    assert {"decode_kernel", "prefill_kernel", "gate_up_kernel", "down_kernel"} <= set(launches.code)
    assert not any(SETTLED in code for code in launches.code.values())


@pytest.mark.parametrize("launches", [90, 80], indirect=True, ids=str)
def test_fp8_experts_load_ahead_and_one_scale_for_each_row(launches):
    experts(1, "bf16 e4m3")[1]()
    assert min(launches.pending["gate_up_kernel"]) >= 3  # at least one part of x and of both weights
    assert not any(SETTLED in launches.code[name] for name in ("gate_up_kernel", "down_kernel")), "settled"
    assert min(launches.pending["down_kernel"]) >= 2
    for name in ("gate_up_kernel", "down_kernel"):
        assert "tensor<64x1x!tt.ptr<f32>" in launches.code[name]
        assert "tensor<64x64x!tt.ptr<f32>" not in launches.code[name]


def test_logits_are_loaded_several_at_a_time(launches):
    """Vocabularies are multiples of 16, and where a mask ends must be known to be one."""
    draw()
    for name in ("largest_kernel", "least_kernel", "race_kernel"):
        assert "%vocab_size: i32 {tt.divisibility = 16 : i32}" in launches.code[name]
