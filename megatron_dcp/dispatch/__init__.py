"""Who holds what: reading samples, cutting packs into shards, exchanging what sits elsewhere."""

from megatron_dcp.dispatch.exchange import exchange, pieces_by_rank
from megatron_dcp.dispatch.microbatch import Shard, build_shard
from megatron_dcp.dispatch.samples import (
    IGNORE,
    Dataset,
    ReadOptions,
    Sample,
    SampleError,
    clip_item,
    dummy_sample,
    padded_sample,
    read_sample,
)

__all__ = [
    "IGNORE",
    "Dataset",
    "ReadOptions",
    "Sample",
    "SampleError",
    "Shard",
    "build_shard",
    "clip_item",
    "dummy_sample",
    "exchange",
    "padded_sample",
    "pieces_by_rank",
    "read_sample",
]
