"""DeepSpeed: ZeRO engines under a per-step plan."""

from megatron_dcp.adapters.deepspeed.api import initialize, load_checkpoint, save_checkpoint
from megatron_dcp.adapters.deepspeed.config import DeepSpeedOptions, split_config

__all__ = ["DeepSpeedOptions", "initialize", "load_checkpoint", "save_checkpoint", "split_config"]
