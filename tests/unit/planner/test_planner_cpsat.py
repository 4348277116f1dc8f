"""`dcp` against CP-SAT on 24 small instances; nightly, because each takes its time limit."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "planner"))
import cpsat

pytest.importorskip("ortools", reason="ortools (constraints.txt) is needed for CP-SAT")


def test_smallest_case_is_a_hint_that_the_solver_accepts() -> None:
    """The model can hold the plan of `dcp`, so its result is never slower."""
    found = cpsat.best_found(cpsat.request_of("wiki", 4, 0), seconds=2.0)
    assert found.bound_us <= found.dcp_us
    assert found.bound_us <= found.best_us <= found.dcp_us
    assert found.ratio <= 1.05


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_within_five_percent_of_the_best_found() -> None:
    ratios = {}
    for case in cpsat.CASES:
        ratios[case] = cpsat.best_found(cpsat.request_of(*case), seconds=15.0).ratio
    assert len(ratios) == 24
    assert max(ratios.values()) <= 1.05, ratios
    assert statistics.fmean(ratios.values()) <= 1.01, ratios
