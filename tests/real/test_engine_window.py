"""Sliding windows: the engine's logits equal Hugging Face's, also where blocks behind the window went to others."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from real.loader import SINGLE_FILE
from testbed.blocks.config import KVRules
from testbed.blocks.kv_sequence import RELEASED
from testbed.core.request import Request
from testbed.errors import ConfigError, ModelError
from testbed.policies.preemption import Auto, Recompute, Swap
from testbed.specs.hf_config import load_hf_config, sliding_layers
from tests.real.engine_helpers import TOLERANCE, checkpoint, requests_of, row, step_logits, tiny_backend, tiny_spec
from tests.real.served import Requests, served
from tests.testbed.core_kit import make_limits

RNG = random.Random(17)
PROMPT = [RNG.randrange(512) for _ in range(23)]
OTHER = [RNG.randrange(512) for _ in range(14)]
TABLE = [9, 3, 17, 5, 30, 2, 21, 40, 11, 13, 6, 7]  # anything but contiguous
OTHER_TABLE = [12, 50, 4, 33, 8]
WINDOWS = [1, 2, 4, 6, 8, 11, 22, 23, 100]  # blocks are of 4 tokens, the prompt of 23


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("qwen3"), tiny_spec())


@pytest.fixture(scope="module")
def references(spec):
    """By window, a function from a whole sequence to its logits at each position, by Hugging Face's eager attention."""

    @cache
    def model(window: int) -> Qwen3ForCausalLM:
        config = Qwen3Config.from_pretrained(
            spec.path, use_sliding_window=True, sliding_window=window,
            layer_types=["sliding_attention"] * spec.num_hidden_layers, attn_implementation="eager",
        )  # fmt: skip
        made = Qwen3ForCausalLM.from_pretrained(spec.path, config=config, dtype=torch.float32).eval()
        assert made.model.layers[0].self_attn.sliding_window == window
        return made

    @cache
    def logits(window: int, *tokens: int) -> torch.Tensor:
        with torch.inference_mode():
            return model(window)(torch.tensor([tokens])).logits[0]

    return lambda window, tokens: logits(window, *tokens)


@pytest.fixture
def expect(references, window):
    return lambda tokens: references(window, tokens)[-1]


@pytest.fixture
def backend(spec, window):
    return tiny_backend(spec, sliding_window=window)


def released(table: list[int], start: int, window: int, block_size: int = 4) -> list[int]:
    """The table as the core leaves it before position `start` is computed."""
    num_released = max(0, start + 1 - window) // block_size
    return [RELEASED] * num_released + table[num_released:]


def assert_close(actual: torch.Tensor, *expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, torch.stack(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("window", WINDOWS)
def test_whole_prefills(backend, expect, window):
    logits = step_logits(backend, row(0, PROMPT, TABLE), row(1, OTHER, OTHER_TABLE))
    assert_close(logits, expect(PROMPT), expect(OTHER))


def test_the_references_look_at_so_many_tokens(references):
    """Beyond (window - 1) tokens for each of the two layers, nothing before matters."""
    for window in (1, 2, 6):
        reach = 2 * (window - 1) + 1
        far, near = list(PROMPT), list(PROMPT)
        far[-reach - 1] += 1
        near[-reach] += 1
        expected = references(window, PROMPT)[-1]
        assert torch.equal(references(window, far)[-1], expected)
        assert not torch.equal(references(window, near)[-1], expected)


@pytest.mark.parametrize("ends", [[8, 16, 23], [1, 2, 9, 22, 23], [22, 23], [5, 6, 7, 23]])
@pytest.mark.parametrize("window", WINDOWS)
def test_chunked_prefill_whose_blocks_behind_the_window_are_overwritten(backend, expect, window, ends):
    start = 0
    for end in ends:
        table = released(TABLE, start, window)
        junk = [block for block, now in zip(TABLE, table, strict=True) if now == RELEASED]
        if junk:
            step_logits(backend, row(7, OTHER[: 4 * len(junk)], junk))
        logits = step_logits(backend, row(0, PROMPT, table, start=start, end=end, samples=end == 23))
        start = end
    assert_close(logits, expect(PROMPT))


@pytest.mark.parametrize("window", WINDOWS)
def test_decodes_far_beyond_the_window_beside_others(backend, expect, window):
    first, second = list(PROMPT), list(OTHER)
    step_logits(backend, row(0, first, TABLE), row(1, second, OTHER_TABLE))
    for step in range(22):  # 23 -> 45 tokens
        first.append(100 + step)
        start = len(first) - 1
        table = released(TABLE, start, window)
        if table[0] == RELEASED:
            step_logits(backend, row(7, [step] * 4, TABLE[:1]))
        rows = [row(0, first, table, start=start)]
        expected = [expect(first)]
        if step < 6:
            second.append(200 + step)
            start = len(second) - 1
            rows.append(row(1, second, released(OTHER_TABLE, start, window), start=start))
            expected.append(expect(second))
        else:
            rows.append(row(2, OTHER, OTHER_TABLE))  # a prefill in the same batch
            expected.append(expect(OTHER))
        assert_close(step_logits(backend, *rows), *expected)


@pytest.mark.parametrize("window", [3, 6])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_sizes(spec, expect, window, block_size):
    backend = tiny_backend(spec, block_size=block_size, sliding_window=window)
    table = random.Random(block_size).sample(range(64), -(-24 // block_size))
    known = [*PROMPT, 9]
    for start, end in ((0, 11), (11, 23), (23, 24)):
        logits = step_logits(
            backend, row(0, known, released(table, start, window, block_size), start=start, end=end, samples=end == 24)
        )
    assert_close(logits, expect(known))


@pytest.mark.parametrize("window", [None, 6])
def test_a_row_that_lacks_a_block_of_its_window_is_not_computed(spec, window):
    backend = tiny_backend(spec, sliding_window=window)
    table = [RELEASED] * 5 + TABLE[5:]
    with pytest.raises(AssertionError, match="names the blocks of its window"):
        step_logits(backend, row(0, PROMPT, table, start=22))  # looks at 17 to 22: blocks 4 and 5


def test_providers_see_no_entry_that_is_no_block(spec):
    runner = tiny_backend(spec, sliding_window=6).runner
    inputs = runner.prepare([row(0, PROMPT, released(TABLE, 22, 6), start=22), row(1, OTHER, OTHER_TABLE)])
    one, other = inputs.forward.attention.block_tables.tolist()
    assert one == [0, 0, 0, 0, *TABLE[4:6]]
    assert other[:4] == OTHER_TABLE[:4]
    assert min(other) >= 0


def test_a_window_is_at_least_one_token(spec):
    with pytest.raises(ConfigError, match="sliding_window is 0"):
        tiny_backend(spec, sliding_window=0)


def configured(spec, folder: Path, **options):
    """The model with these options in its config.json."""
    folder.mkdir()
    config = json.loads((Path(spec.path) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | options))
    (folder / SINGLE_FILE).symlink_to(Path(spec.path) / SINGLE_FILE)
    return replace(tiny_spec(path=str(folder)), **load_hf_config(folder))


@pytest.mark.parametrize("where", [{"max_window_layers": 0}, {"layer_types": ["sliding_attention"] * 2}])
def test_a_model_with_a_window_of_its_own_wants_the_same_of_the_core(spec, references, tmp_path, where):
    windowed = configured(spec, tmp_path / "windowed", use_sliding_window=True, sliding_window=6, **where)
    logits = step_logits(tiny_backend(windowed, sliding_window=6), row(0, PROMPT, TABLE))
    assert_close(logits, references(6, PROMPT)[-1])
    for window, stated in ((None, "null"), (7, "7")):
        with pytest.raises(ModelError, match=f"over 6 tokens, and cache.sliding_window is {stated}; set it to 6"):
            tiny_backend(windowed, sliding_window=window)


def test_a_llama_has_no_window_whatever_its_config_says(tmp_path):
    llama = checkpoint(tmp_path, tiny_spec(architecture="LlamaForCausalLM", tie_word_embeddings=False))
    reference = LlamaForCausalLM.from_pretrained(llama.path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1]
    said = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    windowless = configured(llama, tmp_path / "windowless", **said)
    assert windowless.sliding_window is None
    assert_close(step_logits(tiny_backend(windowless), row(0, PROMPT, TABLE)), expected)


def test_a_window_that_a_config_states_and_does_not_use_asks_for_nothing(spec, references, tmp_path):
    unused = configured(spec, tmp_path / "unused", use_sliding_window=False, sliding_window=6, max_window_layers=0)
    assert_close(step_logits(tiny_backend(unused), row(0, PROMPT, TABLE)), references(100, PROMPT)[-1])


HALF = ["full_attention", "sliding_attention"]
OF_CONFIGS = [
    ("qwen2", {}), ("qwen3", {"use_sliding_window": True}),
    *((kind, {"use_sliding_window": True, "max_window_layers": first}) for kind in ("qwen2", "qwen3")
      for first in range(4)),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}),
    ("qwen3", {"use_sliding_window": True, "layer_types": HALF, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": False, "layer_types": HALF}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    ("mistral", {}), ("mistral", {"sliding_window": None}), ("mistral", {"layer_types": HALF}),
    ("mistral", {"layer_types": ["full_attention"] * 2}), ("mistral", {"layer_types": ["sliding_attention"] * 2}),
    ("llama", {"sliding_window": 6}), ("llama", {"use_sliding_window": True, "max_window_layers": 0}),
    ("mixtral", {}), ("mixtral", {"sliding_window": None}), ("phi3", {}), ("phi3", {"sliding_window": None}),
    ("qwen3_moe", {}), ("qwen3_moe", {"use_sliding_window": True}),
    ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), OF_CONFIGS)
def test_layers_have_the_windows_that_transformers_gives_them(
    tmp_path: Path, kind: str, options: dict[str, object]
) -> None:
    names = {
        "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mistral": "Mistral", "mixtral": "Mixtral",
        "phi3": "Phi3", "llama": "Llama",
    }  # fmt: skip
    architecture = f"{names[kind]}ForCausalLM"
    config = {"model_type": kind, "sliding_window": 6, "num_hidden_layers": 2} | options
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path)
    window = getattr(theirs, "sliding_window", None) if kind != "llama" else None
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 2  # Mistral and others do not look
    expected = [window is not None and one == "sliding_attention" for one in kinds]
    assert sliding_layers(architecture, config) == expected


# --- under the core ---

SHARED = [RNG.randrange(512) for _ in range(17)]
PROMPTS = [SHARED + [RNG.randrange(512) for _ in range(n)] for n in (3, 12, 1, 20, 7, 9)] + [SHARED[:16], [5]]
NUM_TOKENS = 18


class Watch:
    """Stands before a backend's runner: keeps the logits by sequence and position, and counts blocks that had been
    released by a sequence that still ran and held another's tokens."""

    def __init__(self, backend) -> None:
        self._runner = backend.runner
        self.logits_of: list[tuple[int, int, torch.Tensor]] = []  # seq_id, position, logits
        self.num_overwritten = 0
        self._rows: tuple = ()
        self._tables: dict[int, list[int]] = {}
        self._given_back: dict[int, int] = {}  # by block, the running sequence that released it
        backend.runner = self

    def prepare(self, rows):
        self._rows = rows
        for one in rows:
            before = self._tables.get(one.seq_id, [])
            for old, new in zip(before, one.block_table, strict=False):
                if new == RELEASED != old:
                    self._given_back[old] = one.seq_id
            self._tables[one.seq_id] = list(one.block_table)
        for one in rows:
            for block in one.block_table:
                if self._given_back.get(block, one.seq_id) != one.seq_id:
                    del self._given_back[block]
                    self.num_overwritten += 1
        return self._runner.prepare(rows)

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def token_logits(self, hidden, places):
        logits = self._runner.token_logits(hidden, places)
        sampled = [one for one in self._rows if one.samples]
        for one, own in zip(sampled, logits, strict=True):
            self.logits_of.append((one.seq_id, one.start + one.num_tokens - 1, own.clone()))
        return logits


class Named(Requests):
    """Also keeps which request a sequence is."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(requests)
        self.names: dict[int, str] = {}

    def committed(self, step) -> None:
        super().committed(step)
        self.names |= {admission.seq_id: admission.request_id for admission in step.plan.admitted}


ALLOCATE = [("prefill_first", "whole"), ("decode_first", "whole"), ("unified", "whole"), ("unified", "chunk")]


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("preemption", [Recompute, Swap])
@pytest.mark.parametrize(("composition", "allocate"), ALLOCATE)
@pytest.mark.parametrize("window", [1, 6, 13, 25])
def test_every_logit_is_right_under_the_core(spec, references, window, composition, allocate, preemption, caching):
    """In 11 blocks of 4, of which the longest prompt takes 10."""
    backend = tiny_backend(spec, num_gpu_blocks=11, num_cpu_blocks=40, sliding_window=window)
    watch = Watch(backend)
    requests = requests_of([{}, {"temperature": 1.0}], PROMPTS, NUM_TOKENS)
    inbox = served(
        backend, Named(requests), composition, num_blocks=11, num_cpu_blocks=40, caching=caching,
        sliding_window=window, preemption=preemption(), rules=KVRules(allocate=allocate),
        limits=make_limits(budget=48 if composition == "prefill_first" else 16, model_len=256),
    )  # fmt: skip
    assert {name: len(output) for name, output in inbox.outputs.items()} == {r.request_id: NUM_TOKENS for r in requests}
    prompts = {request.request_id: list(request.prompt_token_ids) for request in requests}
    expected = {name: references(window, prompts[name] + output) for name, output in inbox.outputs.items()}
    right = [expected[inbox.names[seq_id]][position] for seq_id, position, _ in watch.logits_of]
    assert_close(torch.stack([logits for *_, logits in watch.logits_of]), *right)
    assert watch.num_overwritten > 0
    assert (inbox.num_preemptions > 0) == (window > 1)  # of a window of 1 nobody holds more than 2 blocks for long
    assert (inbox.num_swapped_in > 0) == (window > 1 and preemption is Swap)
    assert (inbox.num_cached_tokens > 0) == caching


KINDS: list[dict[str, object]] = [{"beam_width": 3, "n": 2}, {"temperature": 1.0, "n": 3}, {"n": 2}, {"beam_width": 2}]


def serve_groups(requests: list[Request], window: int, composition: str, num_blocks: int, caching: bool):
    backend = tiny_backend(num_gpu_blocks=num_blocks, num_cpu_blocks=200, sliding_window=window)
    return served(
        backend, Requests(requests), composition, num_blocks=num_blocks, num_cpu_blocks=200, caching=caching,
        sliding_window=window, preemption=Auto(), limits=make_limits(seqs=16, budget=48, model_len=256),
    )  # fmt: skip


@cache
def completions_alone(window: int):
    completions = {}
    for request in requests_of(KINDS, PROMPTS, NUM_TOKENS):
        one = request.replace(arrival_ns=0)
        completions |= serve_groups([one], window, "prefill_first", 64, caching=False).completions
    return completions


@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified"])
@pytest.mark.parametrize("window", [6, 13])
def test_groups_get_the_tokens_they_get_alone(window, composition):
    requests = requests_of(KINDS, PROMPTS, NUM_TOKENS)
    for caching in (True, False):
        together = serve_groups(requests, window, composition, 18, caching)
        assert together.completions == completions_alone(window)
        assert together.num_swapped_in == together.num_swapped_out > 0
        assert together.num_copied > 0
