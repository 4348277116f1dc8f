"""Rows of `mdcp bench attention`: our ops beside torch's own best way on this CPU.

The baseline is `split` + `scaled_dot_product_attention` per sequence + `cat`. (Slicing `q[s:e]`
would flatter us: its backward is O(sequences x tokens).) Both sides alternate within each repeat
and a row's ratio is the median of the repeats' ratios, so that a busy machine slows both alike.
GFLOP/s count visible pairs only: 4 D H per pair forward, 10 D H backward.

Needs torch and the compiled ops; imported by the command only when it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dcp import _C, ops
from megatron_dcp.data.generators import generate
from megatron_dcp.errors import ConfigError
from megatron_dcp.ops.segments import full_segment, segment_tensor

Row = dict[str, Any]
Clock = Callable[[], float]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A pack of sequences and the heads that attend over it."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    # Speed over the baseline that must be reached: (dtype, direction) -> ratio.
    bars: tuple[tuple[str, float], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def gflop(self, direction: str) -> float:
        pairs = sum(n * (n + 1) / 2 for n in self.lengths)
        return pairs * self.dim * self.heads * (4 if direction == "fwd" else 10) / 1e9


def _bars(*values: float) -> tuple[tuple[str, float], ...]:
    names = ("float32 fwd", "float32 bwd", "bfloat16 fwd", "bfloat16 bwd")
    return tuple(zip(names, values, strict=True))


def _pack(preset: str, tokens: int, longest: int) -> tuple[int, ...]:
    """Samples of a length preset, in order, clipped to `longest`, until `tokens` are reached."""
    taken: list[int] = []
    for length in generate(preset, 4096, 0).lengths:
        room = tokens - sum(taken)
        if room <= 0:
            break
        taken.append(min(length, longest, room))
    return tuple(taken)


def cases() -> list[Case]:
    """What the table holds; the bars are those of the project's attention contract."""
    return [
        Case(name="8192/32", lengths=(256,) * 32, bars=_bars(2.1, 2.4, 3.7, 4.3)),
        Case(name="8192/32 gqa 8/2", lengths=(256,) * 32, kv_heads=2, bars=_bars(2.3, 2.4, 4, 4.6)),
        Case(name="32768/32", lengths=(1024,) * 32, bars=_bars(1.3, 1.6, 2.4, 2.3)),
        Case(name="256x32", lengths=(32,) * 256, bars=_bars(2.8, 3.8, 4.2, 10)),
        Case(name="1x8192", lengths=(8192,), bars=_bars(1.2, 1.35, 2.3, 2.0)),
        Case(name="8192/32 d128", lengths=(256,) * 32, dim=128),
        Case(name="wiki 32K", lengths=_pack("wiki", 32768, 8192)),
        Case(name="long tail 32K", lengths=_pack("github-like", 32768, 16384)),
    ]


def split_sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """The baseline: causal attention of each sequence by torch, q [T, H, D] to [T, H, D]."""
    grouped = q.shape[1] != k.shape[1]
    parts = zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True)
    return torch.cat([_sdpa(a, b, c, grouped) for a, b, c in parts])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Tensor:
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(
        heads_first[0], heads_first[1], heads_first[2], is_causal=True, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


def rows(
    *,
    only: Sequence[str] = (),
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    threads: int = 2,
    repeats: int = 5,
    memory: bool = True,
    cpu_time: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Measure and return the rows {case, metric, unit, value, baseline, ratio, bar, ok}.

    only: names of cases (all when empty). `progress` is told each row as it is done. Speeds are
    GFLOP/s of the fastest repeat, ratios medians over `repeats`; `ok` is None without a bar.
    `cpu_time` counts processor seconds instead of elapsed ones, for a machine that others use as
    well; with more than one thread those would count idle waiting too, so it needs threads=1.
    Raises ConfigError otherwise.
    """
    if cpu_time and threads != 1:
        raise ConfigError(f"cpu_time needs threads=1; found threads={threads}.")
    clock = time.process_time if cpu_time else time.perf_counter
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found: list[Row] = []
    try:
        for row in _all_rows(only, dtypes, repeats, memory, clock):
            found.append(row)
            progress(table([row]).splitlines()[-1])
    finally:
        torch.set_num_threads(before)
    return found


def _all_rows(
    only: Sequence[str], dtypes: Sequence[str], repeats: int, memory: bool, clock: Clock
) -> Iterator[Row]:
    peak = matmul_gflops(clock)
    yield _row("matmul 2048^3", "float32", "GFLOP/s", peak, None, None, None)
    for case in cases():
        if only and case.name not in only:
            continue
        for name in dtypes:
            yield from _speed(case, name, repeats, clock)
            if memory and case.name in ("32768/32", "1x8192"):
                yield from _memory(case, name)
    for name in dtypes:
        if not only or "ring step" in only:
            yield _ring_step(name, repeats, clock)


def _row(
    case: str,
    metric: str,
    unit: str,
    value: float,
    baseline: float | None,
    ratio: float | None,
    bar: float | None,
) -> Row:
    ok = None if bar is None or ratio is None else ratio >= bar
    return {
        "case": case,
        "metric": metric,
        "unit": unit,
        "value": value,
        "baseline": baseline,
        "ratio": ratio,
        "bar": bar,
        "ok": ok,
    }


def matmul_gflops(clock: Clock = time.perf_counter, repeats: int = 5) -> float:
    """The best of a few torch.matmul 2048^3 in float32."""
    a = torch.randn(2048, 2048)
    return 2 * 2048**3 / min(_timed(clock, lambda: a @ a)[0] for _ in range(repeats)) / 1e9


def _timed(clock: Clock, run: Callable[[], Any]) -> tuple[float, Any]:
    start = clock()
    result = run()
    return clock() - start, result


def _inputs(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads)
    qkv = [
        torch.randn(case.tokens, h, case.dim, generator=g).to(dtype).requires_grad_() for h in heads
    ]
    weight = torch.randn(case.tokens, case.heads, case.dim, generator=g).to(dtype)
    return qkv, weight, torch.tensor([0, *case.lengths]).cumsum(0)


def _both(case: Case, qkv: list[Tensor], cu: Tensor) -> dict[str, Callable[[], Tensor]]:
    q, k, v = qkv
    return {
        "ours": lambda: ops.varlen_attention(q, k, v, cu, cu)[0],
        "baseline": lambda: split_sdpa(q, k, v, case.lengths),
    }


def _speed(case: Case, name: str, repeats: int, clock: Clock) -> Iterator[Row]:
    qkv, weight, cu = _inputs(case, DTYPES[name])
    times: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        for side, forward in _both(case, qkv, cu).items():
            seconds, out = _timed(clock, forward)
            back, _ = _timed(clock, lambda out=out: torch.autograd.grad(out, qkv, weight))  # type: ignore[misc]
            if repeat:  # the first warms up
                times.setdefault(f"{side} fwd", []).append(seconds)
                times.setdefault(f"{side} bwd", []).append(back)
    bars = dict(case.bars)
    peak = matmul_gflops(clock) if (case.name, name) == ("32768/32", "float32") else None
    for direction in ("fwd", "bwd"):
        ours, theirs = times[f"ours {direction}"], times[f"baseline {direction}"]
        speed = case.gflop(direction) / min(ours)
        metric = f"{name} {direction}"
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        yield _row(
            case.name,
            metric,
            "GFLOP/s",
            speed,
            case.gflop(direction) / min(theirs),
            ratio,
            bars.get(metric),
        )
        if peak is not None:
            yield _row(case.name, f"{metric} of matmul", "GFLOP/s", speed, peak, speed / peak, 0.7)


def _ring_step(name: str, repeats: int, clock: Clock) -> Row:
    """An off-diagonal ring step, 4096 x 4096, merged into a running result, against torch's flash
    kernel followed by a merge in torch."""
    dtype = DTYPES[name]
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4096, 8, 64, generator=g).to(dtype) for _ in range(3))
    segments = segment_tensor([full_segment(0, 4096, 0, 4096)])
    running, running_lse = ops.new_accumulators(q)
    ops.segment_attention_forward(q, k, v, segments, running, running_lse)
    ours, theirs = [], []
    for repeat in range(repeats + 1):
        out, lse = running.clone(), running_lse.clone()
        seconds, _ = _timed(
            clock,
            lambda out=out, lse=lse: ops.segment_attention_forward(q, k, v, segments, out, lse),  # type: ignore[misc]
        )
        other, _ = _timed(clock, lambda: _torch_ring_step(q, k, v, running, running_lse))
        if repeat:
            ours.append(seconds)
            theirs.append(other)
    gflop = 4 * 4096 * 4096 * 64 * 8 / 1e9
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    return _row(
        "ring step", f"{name} fwd", "GFLOP/s", gflop / min(ours), gflop / min(theirs), ratio, 1.0
    )


def _torch_ring_step(
    q: Tensor, k: Tensor, v: Tensor, running: Tensor, running_lse: Tensor
) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), 0.0, False)
    # The kernel's lse is [1, H, T]; the running one [H, T].
    lse = lse.reshape(running_lse.shape)
    joint = torch.logaddexp(lse, running_lse)
    old, new = ((x - joint).exp().T.unsqueeze(-1) for x in (running_lse, lse))
    return old * running + new * out[0].transpose(0, 1), joint


def _memory(case: Case, name: str) -> Iterator[Row]:
    """Peak resident bytes above the inputs, forward and backward, each side in a process of its
    own (a used heap would hide allocations); Linux only."""
    peaks = {}
    for side in ("ours", "baseline"):
        call = f"peak_bytes({case.name!r}, {name!r}, {side!r})"
        code = f"from {__name__} import peak_bytes; print({call})"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
        )
        if done.stdout.strip() == "None":
            return
        peaks[side] = int(done.stdout) / 1e6
    ratio = peaks["baseline"] / max(peaks["ours"], 1e-9)
    yield _row(case.name, f"{name} peak memory", "MB", peaks["ours"], peaks["baseline"], ratio, 1.0)


def peak_bytes(case_name: str, dtype: str, side: str) -> int | None:
    """What one forward and backward of `side` ("ours" or "baseline") needs above its inputs.

    For a fresh process. None where the kernel's peak counter cannot be reset.
    """
    small = Case(name="warm-up", lengths=(64, 64))
    case = next(c for c in cases() if c.name == case_name)
    start: int | None = None
    for each in (small, case):
        qkv, weight, cu = _inputs(each, DTYPES[dtype])
        start = _reset_peak()
        if start is None:
            return None
        torch.autograd.grad(_both(each, qkv, cu)[side](), qkv, weight)
    # The kernel counts pages in batches: a run that needed none may end a little below its start.
    return max(0, _resident("VmHWM") - (start or 0))


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> int | None:
    """Reset the kernel's peak of this process; its resident bytes, or None where that is not to
    be had."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _resident("VmRSS")


def left_out() -> dict[str, str]:
    """The other attention kernels and why this table does not measure them."""
    on_gpu = {
        "FlashAttention-2": "flash_attn",
        "FlashAttention-3": "flash_attn_interface",
        "Transformer Engine": "transformer_engine",
    }
    reasons = {
        name: "runs on GPUs only" if find_spec(module) else "not installed"
        for name, module in on_gpu.items()
    }
    reasons["cuDNN"] = "runs on GPUs only" if torch.version.cuda else "not in this build of torch"
    varlen = find_spec("torch.nn.attention.varlen")
    reasons["torch varlen_attn"] = "has no CPU kernel" if varlen else "not in this torch"
    return reasons


def table(found: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| case | metric | unit | ours | torch | ratio | bar | ok |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        cells = [row["case"], row["metric"], row["unit"], f"{row['value']:.1f}"]
        cells += ["" if row[x] is None else f"{row[x]:.2f}" for x in ("baseline", "ratio", "bar")]
        cells.append({None: "", True: "yes", False: "no"}[row["ok"]])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    text = (__doc__ or "").split("\n\n")[0]
    p = argparse.ArgumentParser(prog="mdcp bench attention", description=text)
    names = [c.name for c in cases()] + ["ring step"]
    p.add_argument("--case", action="append", default=[], choices=names, help="default: all")
    p.add_argument("--dtype", action="append", default=[], choices=sorted(DTYPES))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--cpu-time", action="store_true", help="processor time; needs --threads 1")
    p.add_argument("--no-memory", action="store_true", help="leave out the peak memory rows")
    p.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    p.add_argument("--json", action="store_true")
    return p


def main(argv: list[str]) -> int:
    """`mdcp bench attention`: rows as they are done, then the verdict or one JSON object."""
    args = parser().parse_args(argv)
    if args.threads < 1 or args.repeats < 1:
        raise ConfigError(f"--threads {args.threads}, --repeats {args.repeats}: both must be >= 1")
    if args.cpu_time and args.threads != 1:
        raise ConfigError(f"--cpu-time needs --threads 1; found --threads {args.threads}")
    out = sys.stderr if args.json else sys.stdout
    print(table([]), file=out)
    found = rows(
        only=args.case,
        dtypes=args.dtype or tuple(DTYPES),
        threads=args.threads,
        repeats=args.repeats,
        memory=not args.no_memory,
        cpu_time=args.cpu_time,
        progress=lambda line: print(line, file=out, flush=True),
    )
    missed = sum(row["ok"] is False for row in found)
    if args.json:
        print(json.dumps({"schema": "mdcp.bench/1", "rows": found, "left_out": left_out()}))
    else:
        others = "; ".join(f"{name}: {reason}" for name, reason in left_out().items())
        print(f"\npaths: {', '.join(f'{name} {_C.cpu_path(name)}' for name in DTYPES)}")
        print(f"not measured: {others}")
        print(f"\n{sum(row['ok'] is True for row in found)} bars held, {missed} missed")
    return 1 if args.bars and missed else 0
