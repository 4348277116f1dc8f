"""The host side plan of tiles: complete, longest first, balanced."""

import numpy as np
import pytest
from shim_driver import BACKWARD_KV, FORWARD, ROOT, Problem
from shim_reference import visible


def read(shim, p, which):
    plan, blob = shim.plan(p, which)
    tiles = blob[plan.tiles :].view(np.int32)[: 4 * plan.tile_count].reshape(-1, 4)
    return plan, tiles


def work_of(tiles, seen):
    """Rows of the other axis between the first and the last that each tile can see."""
    work = []
    for row, rows, *_ in tiles:
        touched = np.flatnonzero(seen[row : row + rows].any(0))
        work.append(0 if touched.size == 0 else touched[-1] - touched[0] + 1)
    return np.array(work)


def case(segments, total):
    x = np.zeros((total, 1, 64))
    return Problem(x, x, x, np.array(segments), "bf16")


@pytest.mark.parametrize("which", [FORWARD, BACKWARD_KV])
def test_tiles_cover_every_row_once_longest_work_first(shim, which):
    segments = [[0, 700, 0, 700, 0, -1], [700, 9, 700, 9, 0, -1], [720, 300, 720, 300, 0, 64]]
    p = case(segments, 1100)
    plan, tiles = read(shim, p, which)
    covered = np.concatenate([np.arange(r, r + n) for r, n, *_ in tiles])
    assert np.array_equal(np.sort(covered), np.arange(1100))
    assert tiles[:, 1].max() <= plan.tile_rows
    seen = visible(p.segments, 1100, 1100)
    work = work_of(tiles, seen if which == FORWARD else seen.T)
    assert np.all(np.diff(work) <= 0)
    assert work[-1] == 0  # rows of no segment come last


def test_blocks_that_take_the_next_tile_stay_balanced(shim):
    """A pack of real lengths, one of them long: within 5 % of a perfect split on 132 blocks."""
    lengths = np.loadtxt(ROOT / "tests/data/lengths/heavy_512.txt", dtype=np.int64)
    lengths = lengths[np.cumsum(lengths) < 1 << 18]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    p = case([[s, n, s, n, 0, -1] for s, n in zip(starts, lengths, strict=True)], lengths.sum())
    plan, tiles = read(shim, p, FORWARD)
    by_row = dict(zip(starts, lengths, strict=True))
    start_of = starts[np.searchsorted(starts, tiles[:, 0], "right") - 1]
    work = tiles[:, 0] + tiles[:, 1] - start_of  # causal: keys up to the tile's last row
    assert plan.tile_count == sum(-(-n // plan.tile_rows) for n in by_row.values())
    assert np.all(np.diff(work) <= 0)
    heads, blocks = 8, 132
    finish = np.zeros(blocks)
    for item in np.repeat(work, heads):
        finish[finish.argmin()] += item
    assert finish.max() <= 1.05 * max(finish.mean(), work[0])
