"""The opponents: published and customary strategies, each written from its description.

Importing this package registers their names; the module of a strategy is imported when the strategy
runs, so that listing names costs nothing and highspy is loaded by `flexsp` alone. They are never
tuned down: a stronger reading of a description wins over a weaker one. See docs/strategies.md.
"""

from __future__ import annotations

from importlib import import_module

from megatron_dcp.planner.registry import Draft, PlanRequest, Strategy, register

# name -> (module, function, what may follow the colon)
BASELINES: dict[str, tuple[str, str, str | None]] = {
    "packed": ("packed", "packed", "the degree of every pack"),
    "static": ("static", "static", "the degree; without it the best one"),
    "bucket": ("bucket", "bucket", "the degree, or `longest`"),
    "dcp-inter": ("dcp_paper", "dcp_inter", "`profile`: the profiled degree and batch as they are"),
    "dcp-intra": ("dcp_paper", "dcp_intra", "`profile`: the profiled degree and batch as they are"),
    "dcp-intra-2024": ("dcp_page", "dcp_intra_2024", None),
    "megatron": ("megatron", "megatron", "the most tokens per rank"),
    "flexsp": ("flexsp", "flexsp", "the solver's seconds for the whole step"),
    "kk": ("kk", "kk", "the degree; without it the best one"),
    "wlb": ("wlb", "wlb", "the degree; without it the best one"),
}


def _lazy(module: str, function: str) -> Strategy:
    def strategy(request: PlanRequest, parameter: str | None) -> Draft:
        found: Strategy = getattr(import_module(f"{__name__}.{module}"), function)
        return found(request, parameter)

    return strategy


for _name, (_module, _function, _parameter) in BASELINES.items():
    register(_name, parameter=_parameter)(_lazy(_module, _function))
