"""One pool of workers for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dcp.testing.pool import WorkerPool

_pool = WorkerPool(limit=24)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Workers are started as tests need them and live until the folder's last test."""
    yield _pool
    _pool.close()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Idle workers poll: none is left to the tests of other folders."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/distributed" in str(item.path):
            item.add_marker(pytest.mark.distributed)
