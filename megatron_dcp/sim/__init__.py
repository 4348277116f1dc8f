"""Discrete-event replay of plans; comparison of strategies. Never asks the planner for times."""

from megatron_dcp.sim.graphs import Span
from megatron_dcp.sim.options import Contention, Noise, ReplayOptions
from megatron_dcp.sim.replay import Replay, replay

__all__ = ["Contention", "Noise", "Replay", "ReplayOptions", "Span", "replay"]
