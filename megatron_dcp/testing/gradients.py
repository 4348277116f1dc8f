"""The measure of gradient equality, and the worst tensor by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def gradient_error(
    found: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> tuple[float, str]:
    """Largest max|g - g_ref| / max(max|g_ref| of the tensor, 1e-6 * max|g_ref| of the model).

    Returns (error, name of the worst tensor); missing tensors are an error of infinity.
    """
    largest = max((float(g.abs().max()) for g in reference.values() if g.numel()), default=0.0)
    worst, where = 0.0, ""
    for name, ref in reference.items():
        if name not in found:
            return float("inf"), name
        if not ref.numel():
            continue
        scale = max(float(ref.abs().max()), 1e-6 * largest)
        diff = float((found[name].to(ref.dtype) - ref).abs().max())
        error = diff / scale if scale else (0.0 if diff == 0.0 else float("inf"))
        if not error <= worst:  # NaN counts as worse
            worst, where = error, name
    return worst, where


def rms_errors(squares: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Per tensor sqrt(sum of (g - g_ref)^2 / sum of g_ref^2), from both sums of every rank."""
    return {
        name: (sum(s[name][0] for s in squares) / sum(s[name][1] for s in squares)) ** 0.5
        for name in squares[0]
    }
