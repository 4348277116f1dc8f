"""Runs in a process of its own, under a sanitizer: `sanitized.py LIBRARY MODE [SITE]`.

MODE `attention`: small cases of every attention kernel, checked against float64; `memory`: a case
of every memory-bound kernel; `fault:NAME`: one kernel of faults.cu; `races`: cases of few accesses,
with the synchronisation at SITE left out where one is given. The sanitizer ends the
process where a kernel errs; else it prints `finished`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from shim_driver import Problem, Shim, accumulation
from shim_reference import backward, forward

SEGMENTS = [[0, 70, 0, 70, 0, -1], [70, 40, 70, 70, 30, 50], [115, 9, 0, 40, 1 << 40, -1]]
CASES = [("bf16", 64, (2, 1), 0), ("fp16", 128, (1, 1), 0), ("bf16", 256, (1, 1), 0),
         ("bf16", 72, (1, 1), 0), ("fp32", 20, (2, 1), 1)]  # fmt: skip

# Several steps in one tile and several tiles in one block, in as few accesses as possible.
RACE_SEGMENTS = [[0, 80, 0, 80, 0, -1]] + [[80 + 2 * i, 2, 80, 2, 0, -1] for i in range(6)]
RACE_CASES = [("bf16", 64, (1, 1), 0), ("fp32", 8, (1, 1), 1)]
RACE_TOKENS = 5  # of a vocabulary of 3; the shim has 3 blocks, so that two take another token


def run(shim: Shim, dtype, dim, heads, scalar, segments=SEGMENTS) -> float:
    """Forward, merge and backward of one case; the largest error against float64."""
    rng = np.random.default_rng(dim)
    rows_q, rows_k = (max(r[i] + r[i + 1] for r in segments) + 6 for i in (0, 2))
    shapes = ((rows_q, heads[0], dim), (rows_k, heads[1], dim), (rows_k, heads[1], dim))
    q, k, v = (rng.standard_normal(shape) / 4 for shape in shapes)
    p = Problem(q, k, v, np.array(segments), dtype, scalar=bool(scalar))
    out, lse = shim.forward(p, out_dtype=accumulation(dtype))
    wanted = forward(p)
    errors = [np.abs(out - wanted[0]).max()]
    empty = (np.zeros(q.shape), np.full(lse.shape, -np.inf))
    errors.append(np.abs(shim.forward(p, running=empty)[0] - wanted[0]).max())
    dout = rng.standard_normal(q.shape)
    grads = shim.backward(p, dout, out, lse)
    errors += [
        np.abs(a - b).max() / np.abs(b).max() for a, b in zip(grads, backward(p, dout), strict=True)
    ]
    return max(np.nan_to_num(errors, nan=np.inf))


def run_memory_ops(shim: Shim) -> None:
    """The shim's own tests of the memory-bound kernels, a case of each."""
    import test_shim_memory_ops as cases

    for schedule in ("leader", "random"):
        shim.configure(schedule, seed=1)
        cases.test_zigzag_deals_every_token_once(shim, 3, schedule)
        cases.test_zigzag_of_more_samples_than_threads(shim)
        cases.test_padding_rows_become_zero(shim, 520)
        for row_bytes in (1, 6, 48, 528):
            cases.test_gather_rows(shim, row_bytes)
        for dtype in ("bf16", "fp64"):
            cases.test_scatter_rows_adds_in_order(shim, dtype)
            cases.test_ulysses_buffers(shim, 8, 2, 4, dtype, 12)
            cases.test_merge_and_its_gradient(shim, dtype)
            cases.test_rope_from_positions(shim, dtype, 0, 40, 12)
            cases.test_cross_entropy_and_its_gradient(shim, dtype, 3001)


def run_memory_races(shim: Shim) -> None:
    """The memory-bound kernels that synchronise, with several rounds in a block."""
    import test_shim_memory_ops as cases

    cases.test_zigzag_of_more_samples_than_threads(shim)
    cases.check_cross_entropy(shim, "fp32", 3, RACE_TOKENS)


def main() -> None:
    shim = Shim(Path(sys.argv[1]))
    mode = sys.argv[2]
    if mode.startswith("fault:"):
        shim.fault(mode.removeprefix("fault:"))
    elif mode == "attention":
        for case in CASES:
            for schedule in ("leader", "random"):
                shim.configure(schedule, "random", seed=1)
                worst = run(shim, *case)
                assert worst < 3e-2, (case, worst)
    elif mode == "memory":
        run_memory_ops(shim)
    elif mode == "races":
        site = sys.argv[3] if len(sys.argv) > 3 else ""
        shim.configure("random", "late", seed=2, skip=site)
        memory = site.startswith(("move", "rowwise"))
        for case in RACE_CASES:
            if not memory and (not site.startswith("attention") or case[3] == ("scalar" in site)):
                worst = run(shim, *case, segments=RACE_SEGMENTS)
                if not worst < 3e-2:
                    raise SystemExit(f"wrong result: {case} is off by {worst}")
        if memory or not site:
            try:
                run_memory_races(shim)
            except AssertionError as error:
                raise SystemExit(f"wrong result: {error}") from error
    print("finished")


if __name__ == "__main__":
    main()
