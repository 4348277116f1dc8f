"""Variable-length attention and its companions: one Python function per op.

Importing this package loads `megatron_dcp._C`; without it `OpsNotBuiltError` says how to build it.

Shapes: T tokens packed along dim 0, H query heads, Hk KV heads (H a multiple of Hk), D head dim
(1 to 256). The accumulation type is float32, and float64 for float64 inputs: every lse, partial
output and gradient accumulator has it. lse is the **natural** log, `[H, total_q]`. A row that sees
no key has out 0, lse -inf and gradient 0, and so has every row outside all segments (padding).

varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, ...) -> (out, lse)
    Packed attention, differentiable through out and lse. Causal masks align to the bottom right.

segment_attention(q, k, v, segments, ...) -> (out, lse)
    The same over a segment list, differentiable.

segment_attention_forward(q, k, v, segments, out, lse, ...) -> None
    In place. `merge=True` (default) continues from the running (out, lse) in the accumulation type
    and leaves rows outside the segments alone; start from out = 0, lse = -inf (`new_accumulators`).
    `merge=False` overwrites everything. Not differentiable: for schemes with their own backward.

segment_attention_backward(dout, q, k, v, out, lse, segments, dq, dk, dv, dlse=None, ...) -> None
    Adds to dq, dk, dv (accumulation type). `out` and `lse` are the *final* ones after all merges,
    also when the segments given are only part of what was merged: calling it once for each part
    gives the whole gradient.

Segments: int64 [S, 6], on the CPU or on the device of q (read on the host: a CUDA call then waits
for its stream, so prefer the CPU); each row is (q_start, q_len, k_start, k_len, diagonal, window).
Local row i and local key j see each other when `j <= i + diagonal` and (`window < 0` or
`j >= i + diagonal - window`). A whole rectangle has diagonal >= k_len - 1; a causal sequence has
diagonal k_len - q_len; a ring step between a query chunk at position p and a key chunk at position
r has diagonal p - r. Segments may share q rows (one softmax over all their keys) and k rows.
`megatron_dcp.ops.segments` builds the usual lists.

Dropout: `dropout_p > 0` needs `sample_ids` [total_q], `q_positions` [total_q] and `k_positions`
[total_k], int64, the sample and the position inside it of each row. The mask of a pair is a
function of (rng_key, sample, head_offset + head, q position, k position) alone, so all shards of a
sample under any plan draw the same mask. `rng_key` is 64 bits; `make_rng_key(seed, site, step)`.

zigzag_partition(cu_seqlens, degree, total=None) -> (index, positions, cu_rank)
gather_rows(x, index), scatter_rows(x, index, rows)
    Who holds which token (chunks cut at floor(i * L / (2 * degree)), no padding), and the moves of
    tokens, positions, labels and weights that follow from it. Adjoints of each other.
ulysses_pack(q, k, v, degree), ulysses_unpack, ulysses_join, ulysses_split
    Buffers of the head all-to-all; uneven tokens per rank, KV heads replicated when degree > Hk.
merge_lse(out_a, lse_a, out_b, lse_b) -> (out, lse)
    Joins two partial softmaxes that were not merged in place.
rope(x, positions, frequencies, scale=1.0, interleaved=False)
    From explicit positions; `rope_frequencies`, `ntk_frequencies`, `yarn_frequencies`.
cross_entropy(logits, labels, weights=None) -> (loss sum, lse)
zero_padding_(x, cu_seqlens)
    Zeroes rows beyond cu_seqlens[-1], in place.

Gradients are of first order: asking for a second derivative of attention, merges or cross-entropy
is an error. Results depend neither on the number of threads nor on what is packed beside a
sequence, bit for bit. Inputs: float64, float32, bfloat16, float16; unit stride in D, any other
strides.
"""

from __future__ import annotations

from megatron_dcp.ops._load import OpsNotBuiltError, load_extension

load_extension()

from megatron_dcp.ops.attention import (  # noqa: E402  (the ops must be registered first)
    make_rng_key,
    new_accumulators,
    segment_attention,
    segment_attention_backward,
    segment_attention_forward,
    varlen_attention,
)
from megatron_dcp.ops.relayout import (  # noqa: E402
    gather_rows,
    scatter_rows,
    ulysses_join,
    ulysses_pack,
    ulysses_split,
    ulysses_unpack,
    zero_padding_,
    zigzag_partition,
)
from megatron_dcp.ops.rows import (  # noqa: E402
    cross_entropy,
    merge_lse,
    ntk_frequencies,
    rope,
    rope_frequencies,
    yarn_frequencies,
)

__all__ = [
    "OpsNotBuiltError",
    "cross_entropy",
    "gather_rows",
    "make_rng_key",
    "merge_lse",
    "new_accumulators",
    "ntk_frequencies",
    "rope",
    "rope_frequencies",
    "scatter_rows",
    "segment_attention",
    "segment_attention_backward",
    "segment_attention_forward",
    "ulysses_join",
    "ulysses_pack",
    "ulysses_split",
    "ulysses_unpack",
    "varlen_attention",
    "yarn_frequencies",
    "zero_padding_",
    "zigzag_partition",
]
