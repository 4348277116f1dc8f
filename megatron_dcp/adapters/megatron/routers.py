"""What the routers of a planned model have in common, and the two that only leave padding out.

A router's methods that look beyond one token are replaced on the instance by stand-ins, as far as
its settings use them. The router is not told the microbatch: it learns it from the attention of its
own layer, which runs before it, in a recomputation too. With tensor parallelism it sees a slice of
the microbatch's rows (Megatron trains experts with sequence parallelism only).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.dist import PlacementContext


class StandIn:
    """Stands in for `method` of one router; `kind` names the setting that needs it."""

    kind = ""
    method = ""
    parameters: tuple[str, ...] = ()  # that the original must have

    def __init__(self, router: Any, attention: Any) -> None:
        self.router, self.attention = router, attention
        self.stock = getattr(router, self.method)

    @classmethod
    def wanted(cls, router: Any) -> bool:
        """Whether the router's settings use the method."""
        return bool(router.get_aux_loss_coeff(cls.kind))

    @property
    def placement(self) -> PlacementContext | None:
        """The microbatch of the forward that runs; None where it is not planned."""
        found: PlacementContext | None = self.attention.mdcp_placement
        return found

    def first_row(self, rows: int) -> int:
        """Which of the microbatch's rows is this tensor rank's first, when each has `rows`."""
        return int(self.router.tp_group.rank()) * rows

    def real_rows(self, ctx: PlacementContext, rows: int) -> int:
        """How many of this tensor rank's `rows` are tokens of samples; they come first."""
        return 0 if ctx.dummy else min(max(ctx.tokens - self.first_row(rows), 0), rows)

    def log(
        self, probs: Tensor, coefficient: float, loss: Tensor, name: str, *, over_data: bool = False
    ) -> Tensor:
        """Add a loss to Megatron's log and nothing to the gradients; gives `probs` back.

        over_data: summed over the data ranks too, else averaged over them.
        """
        router = self.router
        known = inspect.signature(router.attach_and_log_load_balancing_loss).parameters
        options: dict[str, Any] = {"valid_token_count": 0}
        if "aux_loss_scale_num_tokens" in known:  # else the branch dev sums token counts over ranks
            options["aux_loss_scale_num_tokens"] = 0
        if over_data and "reduce_group_has_dp" in known:  # up to 0.17
            options["reduce_group_has_dp"] = True
        elif over_data:
            options["needs_dp_avg"] = False
        group = router.tp_dp_cp_group if over_data else router.tp_cp_group
        shown: Tensor = router.attach_and_log_load_balancing_loss(
            probs, coefficient, loss.detach(), name, group, **options
        )
        return shown


class ZLoss(StandIn):
    """The router's z loss is per token already: only dummies and padding rows are masked."""

    kind = "moe_z_loss_coeff"
    method = "apply_z_loss"
    parameters = ("logits", "padding_mask")

    @classmethod
    def wanted(cls, router: Any) -> bool:
        return bool(router.config.moe_z_loss_coeff)

    def __call__(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        ctx = self.placement
        if ctx is not None:
            padding_mask = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            padding_mask[: self.real_rows(ctx, len(logits))] = False
        out: Tensor = self.stock(logits, padding_mask=padding_mask)
        return out


class ExpertBias(StandIn):
    """Counts for the update of the expert bias, which Megatron makes once per global batch."""

    kind = "moe_router_enable_expert_bias"
    method = "_apply_expert_bias"
    parameters = ("routing_map",)

    @classmethod
    def wanted(cls, router: Any) -> bool:
        return bool(router.enable_expert_bias)

    def __call__(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        ctx = self.placement
        if ctx is None:
            self.stock(routing_map, padding_mask=padding_mask)
        elif torch.is_grad_enabled():  # once, with and without recomputation
            real = routing_map[: self.real_rows(ctx, len(routing_map))]
            self.router.local_tokens_per_expert += real.sum(dim=0)
