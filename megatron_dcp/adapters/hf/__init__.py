"""Hugging Face: Transformers, TRL and Accelerate under a per-step plan.

Importing this package registers `attn_implementation="megatron_dcp"`.
"""

from megatron_dcp.adapters.hf.accelerate import initialize_accelerate
from megatron_dcp.adapters.hf.attention import KEYWORD, NAME, register
from megatron_dcp.adapters.hf.callback import MdcpCallback
from megatron_dcp.adapters.hf.loss_step import microbatch_loss
from megatron_dcp.adapters.hf.options import TrainerOptions
from megatron_dcp.adapters.hf.prepare import Prepared, forward_losses, prepare, weighted_sum
from megatron_dcp.adapters.hf.trainer import MdcpTrainerMixin
from megatron_dcp.adapters.hf.vision import ImageSamples

register()

__all__ = [
    "KEYWORD",
    "NAME",
    "ImageSamples",
    "MdcpCallback",
    "MdcpTrainerMixin",
    "Prepared",
    "TrainerOptions",
    "forward_losses",
    "initialize_accelerate",
    "microbatch_loss",
    "prepare",
    "register",
    "weighted_sum",
]
