"""One pool of workers for all distributed tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_dcp.testing.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Workers are started as tests need them and live until the session ends."""
    workers = WorkerPool(limit=24)
    yield workers
    workers.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/distributed" in str(item.path):
            item.add_marker(pytest.mark.distributed)
