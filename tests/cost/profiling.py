"""Profiles made from known prices, for the tests of fits."""

import random
from dataclasses import asdict

from sim.cost.base import CostModel
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.specs.model import ModelSpec
from testbed.specs.profiles import MeasuredStep, ProfileManifest, number_repeats

MODEL = ModelSpec("small", num_hidden_layers=4)


def manifest(**changes: object) -> ProfileManifest:
    model = {name: value for name, value in asdict(MODEL).items() if name != "path"}
    return ProfileManifest(**{"device": "h100", "model": model, "block_size": 16, "dtype": "bfloat16"} | changes)


def grid(max_decodes: int = 256, seed: int = 7) -> list[BatchShape]:
    """Prefills, decodes, mixtures and moves, each varied on its own."""
    draw = random.Random(seed)
    sizes = [num for num in (1, 2, 3, 4, 6, 8, 16, 24, 32, 64, 128, 256) if num <= max_decodes]
    shapes = [
        BatchShape(num, num * each, (), num, longest_decode_context=each * draw.choice((1, 1, 1 + (num > 1), num)))
        for num in sizes
        for each in (16, 200, 900, 3000)
    ]
    for _ in range(80):
        chunks = tuple(
            PrefillChunk(draw.choice((0, draw.randrange(2000))), draw.choice((16, 60, 250, 900)))
            for _ in range(draw.randrange(1, 4))
        )
        decodes = draw.choice((0, 0, draw.randrange(1, max_decodes)))
        context = decodes * draw.randrange(1, 3000) if decodes else 0
        longest = -(-context // decodes) * draw.choice((1, 1 + (decodes > 1))) if decodes else 0
        shapes.append(BatchShape(decodes, context, chunks, decodes + len(chunks), longest_decode_context=longest))
    for num in (1, 4, 16, 64):
        shapes += [BatchShape(8, 8 * 500, (), 8, num), BatchShape(8, 8 * 500, (), 8, 0, num)]
        shapes += [BatchShape(8, 8 * 500, (), 8, num, 2 * num), BatchShape(8, 8 * 500, (), 8, 0, 0, num)]
    return shapes


def measured(model: CostModel, shapes: list[BatchShape], noise: float = 0.0, repeats: int = 1) -> list[MeasuredStep]:
    """What an engine with these prices and this relative noise would have measured."""
    draw = random.Random(3)
    steps = []
    for shape in shapes * repeats:
        factor = 1 + noise * draw.gauss(0, 1)
        spans = Spans(*(round(ns * factor) for ns in model.price(shape)))
        steps.append((shape, spans, sum(spans)))
    return number_repeats(steps)
