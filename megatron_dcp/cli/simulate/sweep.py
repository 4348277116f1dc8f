"""Sweeps: the same comparison over ranks, context limit, network rate, memory or model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_dcp.cli.simulate.options import SimulateOptions
from megatron_dcp.cli.simulate.study import Progress, run_study, with_baselines
from megatron_dcp.cost.derive import profile as analytic
from megatron_dcp.cost.hardware import hardware
from megatron_dcp.errors import ConfigError
from megatron_dcp.sim.compare import to_object

_K = 1024
AXES: dict[str, tuple[str, tuple[float, ...]]] = {
    "ranks": ("data ranks (4 samples per rank)", (8, 32, 128, 512, 1024, 4096)),
    "context": (
        "context limit, tokens", (8 * _K, 32 * _K, 64 * _K, 128 * _K, 384 * _K, 2048 * _K)
    ),
    "network": ("network, Gbit/s per rank", (50, 100, 200, 400, 800, 1600, 3200)),
    "memory": ("memory, GB per rank", (40, 64, 80, 96, 141, 192)),
    "model": ("parameters, 1e9", (1.3, 7, 13, 30, 70)),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """points[i]: (value on the axis, `mdcp.simulate/1` object or the reason why there is none)."""

    axis: str
    label: str
    points: list[tuple[float, dict[str, Any] | str]]


def axes(text: str) -> list[str]:
    """Axis names of --sweep, checked."""
    names = list(AXES) if text == "all" else [x.strip() for x in text.split(",")]
    for name in names:
        if name not in AXES:
            raise ConfigError(f"--sweep {name!r}: known axes are {', '.join(AXES)}, or all")
    return names


def _at(options: SimulateOptions, axis: str, value: float) -> SimulateOptions:
    """The options of one point. A rank sweep keeps 4 samples per rank."""
    if axis == "ranks":
        return replace(options, ranks=int(value), batch=4 * int(value))
    if axis == "context":
        return replace(options, context=int(value))
    if axis == "network":
        if options.hardware is None:
            raise ConfigError("--sweep network changes a hardware preset: pass --hardware, --model")
        return replace(options, network_gbit_per_s=value)
    if axis == "model":
        if options.hardware is None:
            raise ConfigError("--sweep model changes a model preset: pass --hardware and --model")
        return replace(options, model=f"gpt-{value:g}b")
    if options.hardware is None:
        raise ConfigError("--sweep memory changes a hardware preset: pass --hardware and --model")
    return replace(options, memory_gb=value)


def run_sweep(options: SimulateOptions, names: list[str], axis: str, progress: Progress) -> Sweep:
    """Up to 3 steps of one seed per point: a curve, not a benchmark."""
    label, values = AXES[axis]
    points: list[tuple[float, dict[str, Any] | str]] = []
    for value in values:
        point = replace(
            _at(options, axis, value), steps=min(3, options.steps), seeds=1, sweep=None,
            limit_s=options.limit_s / len(values),
        )  # fmt: skip
        progress(f"sweep {axis} = {value:g}")
        try:
            study = run_study(point, with_baselines(names), lambda _: None)
        except ConfigError as error:  # the model's state alone exceeds this memory
            points.append((value, str(error)))
            continue
        points.append((value, to_object(study.tallies, point.ranks)))
    return Sweep(axis=axis, label=label, points=points)


def check_sweep(options: SimulateOptions) -> list[str]:
    """Refuse an impossible sweep before the main study runs."""
    names = axes(options.sweep or "")
    for name in names:
        _at(options, name, AXES[name][1][0])
    if options.hardware is not None and options.model is not None:
        analytic(hardware(options.hardware), options.model, options.topology,
                 lockstep=options.domain)  # fmt: skip
    return names
