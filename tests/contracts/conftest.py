"""Pools of worker processes for the contract tests, one per number of ranks.

DeepSpeed and Accelerate keep state for the life of a process, so a pool never changes its size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dcp.testing.pool import WorkerPool
from tests.contracts.megatron_env import own_python

os.environ.setdefault("DS_ACCELERATOR", "cpu")


_pools: list[WorkerPool] = []


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Idle workers poll: none is left to the tests of other folders."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        for workers in _pools:
            workers.close()


def _running(workers: WorkerPool) -> Iterator[WorkerPool]:
    _pools.append(workers)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def pool2() -> Iterator[WorkerPool]:
    yield from _running(WorkerPool(limit=2, timeout_s=280.0))


@pytest.fixture(scope="session")
def pool4() -> Iterator[WorkerPool]:
    yield from _running(WorkerPool(limit=4, timeout_s=280.0))


@pytest.fixture
def pools(pool2: WorkerPool, pool4: WorkerPool) -> dict[int, WorkerPool]:
    return {2: pool2, 4: pool4}


# Megatron drops its process groups without destroying them, its hooks keep them alive, and every
# gloo group keeps threads that poll: a run ends with its processes.
def _forked(python: str | None = None) -> WorkerPool:
    preload = "tests.contracts.megatron_cases:preload"
    return WorkerPool(limit=4, timeout_s=280.0, fork=True, preload=preload, python=python)


@pytest.fixture(scope="session")
def megatron_pool() -> Iterator[WorkerPool]:
    """Workers on the ordinary environment's megatron-core (0.16.1)."""
    yield from _running(_forked())


@pytest.fixture(scope="session")
def own_megatron_pool() -> Iterator[WorkerPool]:
    """Workers on the venv with the second megatron-core (0.19.2)."""
    yield from _running(_forked(own_python()))
