"""torch.compile of a model's layers: how often it compiles while every step has other shapes.

Attention stays outside the graph (a placement changes with every microbatch), so a layer is one
graph before it, one at the call and one after. The token count is dynamic; torch specialises on a
single token, so one and many are the shape classes.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import megatron_dcp as mdcp
from megatron_dcp.testing.models import TinyModel

GRAPHS_PER_LAYER = 3  # before attention, at its call, after it
SHAPE_CLASSES = 2  # one token, many tokens


@pytest.mark.parametrize("layers", [1, 3])
def test_graphs_are_bounded_by_shape_classes(layers: int) -> None:
    """Sixty packs of other totals, sample counts and lengths; equal layers share their graphs."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = TinyModel(layers=layers)
    for layer in model.layers:
        layer.compile(backend=counter, dynamic=True)
    rng = random.Random(0)
    totals = set()
    for _ in range(60):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 5))]
        run(model, lengths)
        totals.add(sum(lengths))
    run(model, [1])
    assert len(totals) > 30
    assert counter.frame_count <= GRAPHS_PER_LAYER * SHAPE_CLASSES
    seen = counter.frame_count
    for lengths in ([1], [17, 3], [200], [64, 64, 64]):
        run(model, lengths)
    assert counter.frame_count == seen  # nothing compiles once the classes are known


def test_static_shapes_would_compile_for_every_pack() -> None:
    """What `dynamic=True` is for: without it each token count is a graph, until torch gives up."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = TinyModel(layers=1)
    model.layers[0].compile(backend=counter, dynamic=False)
    counts = []
    for n in range(3, 8):
        run(model, [n])
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert all(b > a for a, b in itertools.pairwise(counts)), counts


def run(model: TinyModel, lengths: list[int]) -> None:
    ids = torch.arange(sum(lengths)) % 64
    with mdcp.packed(lengths) as pack:
        torch.autograd.backward(model(ids, pack.position_ids).sum())
