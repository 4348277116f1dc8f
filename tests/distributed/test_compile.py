"""torch.compile of a layer: attention stays outside the graph, gradients stay the same."""

from __future__ import annotations

import pytest

from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.gradients:gradient_case"


@pytest.mark.nightly  # the compiler alone takes a minute and a half on two cores
def test_a_compiled_layer_under_a_random_plan(pool: WorkerPool) -> None:
    """aot_eager: the graph and its cuts without a code generator, which is slow to start."""
    results = pool.run(2, CASE, seed=4, compiled=True)
    assert max(r["error"] for r in results) <= 1e-10
