"""`megatron.training` under a plan: the patches that `mdcp launch` applies before the script runs.

Four names are replaced, all looked up by Megatron at call time: the argument parser's builder (our
flags), the argument check (refusals, before anything is built), `get_forward_backward_func` in the
training module (the planned schedule) and the check of a checkpoint's arguments (what a resume
needs travels among them). GPTModel gets a plan-aware layer spec. Without `--mdcp`
on the command line every replacement does what the original does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from megatron_dcp.adapters.megatron.flags import (
    add_flags,
    read_flags,
    refuse_conflicts,
    refuse_file,
)
from megatron_dcp.adapters.megatron.patchset import Patch, PatchSet
from megatron_dcp.adapters.megatron.versions import require_tested
from megatron_dcp.errors import AdapterError, ConfigError

STATE = "mdcp_state"  # attribute of Megatron's arguments, which every checkpoint holds

_runner: Any = None


def _args() -> Any:
    from megatron.training import get_args

    return get_args()


def _enabled() -> bool:
    """Whether this run was started with --mdcp (False before arguments are known)."""
    from megatron.training import global_vars

    args = getattr(global_vars, "_GLOBAL_ARGS", None)
    refuse_file(args)  # the file may say mdcp itself, and what it says is not checked
    return bool(getattr(args, "mdcp", False))


def _wrap_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_flags(original(parser))

    return add_megatron_arguments


def check_arguments(args: Any) -> None:
    """Everything that can be refused from the command line; sets what DCP implies."""
    planner, megatron = read_flags(args)
    require_tested(allow_untested=megatron.allow_untested)
    refuse_conflicts(args)
    from megatron_dcp.planner.registry import find_strategy

    try:
        find_strategy(planner.strategy)
        if planner.cost != "auto":
            from megatron_dcp.cost import resolve

            resolve(planner.cost)
    except ConfigError as error:
        raise AdapterError(f"--mdcp options: {error}") from error
    args.calculate_per_token_loss = True
    if getattr(args, "pipeline_model_parallel_size", 1) > 1 and not getattr(
        args, "num_experts", None
    ):
        # Stages exchange shapes; Megatron ties that to a dispatcher that a dense model ignores.
        args.moe_token_dispatcher_type = "alltoall"


def _wrap_validate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Any, *more: Any, **kwargs: Any) -> Any:
        planned = getattr(args, "mdcp", False)
        if planned:
            check_arguments(args)
        out = original(args, *more, **kwargs)
        if planned and getattr(args, "use_varlen_dataset", False):
            # Megatron chose a packing scheduler for this data set; here the plan packs.
            args.sequence_packing_scheduler = None
        return out

    return validate_args


def _splitter(args: Any) -> Any:
    """How rows become samples, from Megatron's own flags unless --mdcp-split says so."""
    from megatron_dcp.adapters.megatron.samples import Splitter

    _, megatron = read_flags(args)
    split = megatron.split
    if split == "auto":
        apart = getattr(args, "reset_attention_mask", False) or getattr(
            args, "dataloader_inter_document_masking", False
        )
        split = "documents" if apart else "windows"
    return Splitter(
        split=split,
        eod=_end_of_document(args) if split == "documents" else None,
        restarts=bool(getattr(args, "reset_position_ids", False)),
        trim=not megatron.no_trim,
    )


def _end_of_document(args: Any) -> int | None:
    """The tokenizer's end-of-document id, where the version has a global tokenizer."""
    from megatron.training import global_vars

    tokenizer = getattr(global_vars, "_GLOBAL_TOKENIZER", None)
    if tokenizer is None:
        for name in ("megatron.core.tokenizers.utils.build_tokenizer",
                     "megatron.core.tokenizers.text.utils.build_tokenizer"):  # fmt: skip
            try:
                tokenizer = import_module(name).build_tokenizer(args)
                break
            except ImportError:
                continue
    eod = getattr(tokenizer, "eod", None)
    return None if eod is None else int(eod)


def runner() -> Any:
    """The run's MegatronDcp, made at the first call from Megatron's arguments."""
    global _runner
    if _runner is None:
        from megatron_dcp.adapters.megatron.runner import MegatronDcp

        args = _args()
        planner, megatron = read_flags(args)
        _runner = MegatronDcp(
            planner=planner,
            megatron=megatron,
            reader=_splitter(args).samples,
            forward_step=_named_function(megatron.forward_step),
            step_of=lambda: int(getattr(args, "curr_iteration", 0) or 0),
            after_step=lambda state: setattr(args, STATE, state),
        )
        state = getattr(args, STATE, None)
        if state is not None:
            _runner.load_state_dict(state)
    return _runner


def current_runner() -> Any:
    """The run's MegatronDcp, or None before the first planned call."""
    return _runner


def _named_function(path: str | None) -> Any:
    """`package.module:function`; AdapterError when it cannot be found."""
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise AdapterError(
            f"--mdcp-forward-step {path}: looked for a function `package.module:function`, {error}"
        ) from error


def _wrap_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = original(*args, **kwargs)
        return runner().wrap(schedule) if _enabled() else schedule

    return get_forward_backward_func


def take_state(checkpoint_args: Any) -> None:
    """What a resume needs, from the arguments of a checkpoint; without --mdcp it has none."""
    state = getattr(checkpoint_args, STATE, None)
    if state is not None:
        setattr(_args(), STATE, state)


def _wrap_loaded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, *more: Any, **kwargs: Any) -> Any:
        out = original(checkpoint_args, *more, **kwargs)
        if _enabled():
            take_state(checkpoint_args)
        return out

    return check_checkpoint_args


def plan_aware_if_enabled(spec: Any) -> Any:
    """The layer spec that a GPTModel of this run is built from."""
    if not _enabled():
        return spec
    from megatron_dcp.adapters.megatron.attention import plan_aware_spec

    return plan_aware_spec(spec)


def _wrap_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, config: Any, transformer_layer_spec: Any, *a: Any, **k: Any) -> None:
        spec = plan_aware_if_enabled(transformer_layer_spec)
        original(self, config, spec, *a, **k)

    return __init__


def patch_set() -> PatchSet:
    """The patches of `mdcp launch`, in the order in which Megatron comes to them."""
    return PatchSet(
        trainer="Megatron-LM",
        patches=[
            Patch(
                name="flags",
                target="megatron.training.arguments:add_megatron_arguments",
                reason="adds --mdcp and --mdcp-* to Megatron's parser",
                parameters=("parser",),
                make=_wrap_arguments,
            ),
            Patch(
                name="refusals",
                target="megatron.training.arguments:validate_args",
                reason="refuses what cannot run under a plan and sets per-token loss",
                parameters=("args", "defaults"),
                make=_wrap_validate,
            ),
            Patch(
                name="refusals-initialize",
                target="megatron.training.initialize:validate_args",
                reason="the same name as 0.16 and 0.17 import it into initialize",
                parameters=("args", "defaults"),
                make=_wrap_validate,
                optional=True,
            ),
            Patch(
                name="schedule",
                target="megatron.training.training:get_forward_backward_func",
                reason="gives train and evaluate the planned schedule",
                make=_wrap_schedule,
            ),
            Patch(
                name="schedule-signature",
                target="megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining",
                reason="only probed: the arguments that the planned schedule passes on",
                parameters=(
                    "forward_step_func",
                    "data_iterator",
                    "model",
                    "num_microbatches",
                    "forward_only",
                    "collect_non_loss_data",
                ),
                make=lambda original: original,
            ),
            Patch(
                name="resume",
                target="megatron.training.checkpointing:check_checkpoint_args",
                reason="takes the plan's state from the arguments that a checkpoint holds",
                parameters=("checkpoint_args",),
                make=_wrap_loaded,
            ),
            Patch(
                name="layer-spec",
                target="megatron.core.models.gpt.gpt_model:GPTModel.__init__",
                reason="self-attention, RoPE and core attention follow the placement",
                parameters=("self", "config", "transformer_layer_spec"),
                make=_wrap_model,
            ),
            Patch(
                name="self-attention-signature",
                target="megatron.core.transformer.attention:SelfAttention.forward",
                reason="only probed: the placement travels in packed_seq_params",
                parameters=("hidden_states", "rotary_pos_emb", "packed_seq_params"),
                make=lambda original: original,
            ),
        ],
    )


def reset() -> None:
    """Forget the run's MegatronDcp (several runs in one process: tests)."""
    global _runner
    _runner = None


def fail_everywhere(error: BaseException) -> int:
    """Report an error that every rank has met alike; the process ends with status 1.

    The process group is left alone: destroying it would wait for ranks that are already gone.
    """
    print(f"mdcp launch: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return 1
