"""The engine that executes plans: steps, accumulation, reduction, recompute, sampling."""

from megatron_dcp.runtime.backend import Backend
from megatron_dcp.runtime.engine import Engine
from megatron_dcp.runtime.loader import StepLoader
from megatron_dcp.runtime.sampler import GlobalSampler, SamplerConfig
from megatron_dcp.runtime.step import Microbatch, Step

__all__ = [
    "Backend",
    "Engine",
    "GlobalSampler",
    "Microbatch",
    "SamplerConfig",
    "Step",
    "StepLoader",
]
