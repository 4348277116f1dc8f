"""The SIMT machine itself: it runs right kernels and notices wrong ones (faults.cu)."""

import numpy as np
import pytest
from shim_driver import COPIES, FAULTS, SCHEDULES, ShimError

X = np.arange(256, dtype=np.float32)
RIGHT = {
    "reverse": X[::-1],
    "from_the_left": np.concatenate([X[:32], X[:-32]]),
    "two_rounds": 2 * X[::-1] + 1000,
    "warp_exchange": X.reshape(-1, 2)[:, ::-1].ravel(),
    "async_copy": X,
}


def line_of(kernel: str, call: str, nth: int = 0) -> str:
    """faults.cu:LINE of the nth `call` inside `kernel`."""
    lines = FAULTS.read_text().splitlines()
    start = next(i for i, text in enumerate(lines) if text.startswith(f"void {kernel}("))
    found = [i for i in range(start, len(lines)) if call in lines[i]]
    return f"faults.cu:{found[nth] + 1}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel", RIGHT)
def test_right_kernels_are_right_under_every_schedule(shim, kernel, schedule):
    for copies in COPIES:
        shim.configure(schedule, copies, seed=3)
        assert np.array_equal(shim.fault(kernel), RIGHT[kernel])


def caught_by(shim, kernel: str, site: str) -> list[tuple]:
    """The settings whose result changes when the synchronisation at `site` is left out."""
    found = []
    for schedule in SCHEDULES:
        for copies in COPIES:
            for seed in (0, 3):
                shim.configure(schedule, copies, seed, skip=site)
                try:
                    wrong = not np.array_equal(shim.fault(kernel), RIGHT[kernel])
                except ShimError:
                    wrong = True
                if wrong:
                    found.append((schedule, copies, seed))
    return found


@pytest.mark.parametrize(
    ("kernel", "call", "nth"),
    [
        ("reverse", "block_sync", 0),
        ("from_the_left", "block_sync", 0),
        ("two_rounds", "block_sync", 0),
        ("two_rounds", "block_sync", 1),
        ("warp_exchange", "warp_sync", 0),
        ("async_copy", "copy_async_wait", 0),
        ("async_copy", "block_sync", 0),
    ],
)
def test_a_missing_synchronisation_shows(shim, kernel, call, nth):
    assert caught_by(shim, kernel, line_of(kernel, call, nth))


def test_lockstep_alone_would_miss_some(shim):
    """The reason for the other schedules."""
    found = caught_by(shim, "from_the_left", line_of("from_the_left", "block_sync"))
    assert {schedule for schedule, *_ in found} >= {"leader", "laggard", "descending"}
    assert "lockstep" not in {schedule for schedule, *_ in found}


def test_shared_memory_starts_as_nan(shim):
    assert np.isnan(shim.fault("unwritten_shared")).all()


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("lonely_barrier", "wait for each other"),
        ("crossed_barriers", "different barriers"),
        ("half_a_shuffle", "wait for each other"),
    ],
)
def test_threads_that_do_not_meet_are_an_error(shim, kernel, says):
    with pytest.raises(ShimError, match=says) as failed:
        shim.fault(kernel)
    assert failed.value.code == 719
    assert "faults.cu:" in str(failed.value)
    assert np.array_equal(shim.fault("reverse"), RIGHT["reverse"])  # the machine goes on


def test_fragments_of_a_product(shim):
    a = (np.arange(256) % 7).reshape(16, 16)
    b = (np.arange(256) % 5 - 2).reshape(16, 16)[:, :8]
    assert np.array_equal(shim.fault("product")[:128].reshape(16, 8), a @ b + 1)
