"""Run a training script through `mdcp launch` inside a persistent worker, and record its steps.

Megatron keeps its state in module globals; it is cleared between runs so that one worker, whose
start costs more than a run, serves many cases.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_dcp.adapters.megatron import standins, training, versions
from megatron_dcp.adapters.megatron.patchset import Patch
from megatron_dcp.errors import MdcpError
from tests.contracts.megatron_plans import register_mix


def _clear_megatron() -> None:
    from megatron.core import parallel_state, rerun_state_machine
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training import global_vars
    from megatron.training import training as trainer

    global_vars.destroy_global_vars()
    unset_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    for name in ("_GLOBAL_ENERGY_MONITOR", "_GLOBAL_SIGNAL_HANDLER"):
        if hasattr(global_vars, name):
            setattr(global_vars, name, None)
    if hasattr(trainer, "_TRAIN_START_TIME"):
        trainer._TRAIN_START_TIME = 0.0


def out_of_memory(iterator: Any, model: Any) -> Any:
    """A forward step for --mdcp-forward-step whose device is full."""
    import torch

    next(iterator)
    raise torch.OutOfMemoryError("made up")


def run(
    *,
    script: str,
    argv: list[str],
    oom_file: str | None = None,
    version: str | None = None,
    leave_out: list[str] | None = None,
) -> dict[str, Any]:
    """Losses and gradient norms of each step (or the error) of one run on this rank.

    version: what megatron-core says of itself. leave_out: stand-ins to do without; any error is
    then part of the result.
    """
    if oom_file is not None:
        os.environ["MDCP_OOM_FILE"] = oom_file
    told = versions.installed_version
    if version is not None:
        versions.installed_version = lambda: version
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(dist.get_rank())
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    register_mix()
    if leave_out:
        standins.remove()
    standins.install(leave_out=tuple(leave_out or ()))
    steps: dict[str, Any] = {"losses": [], "norms": [], "evaluations": []}
    patches = training.patch_set()
    patches.patches += [_recorder(steps), _evaluation_recorder(steps)]
    before, log = list(sys.argv), io.StringIO()
    try:
        patches.apply()
        sys.argv = [script, *argv]
        import runpy

        with contextlib.redirect_stdout(log):
            runpy.run_path(script, run_name="__main__")
        current = training.current_runner()
        steps["digests"] = current.digests if current is not None else []
        last = current.last_plan if current is not None else None
        steps["budget"] = last.budget_bytes if last is not None else None
    except Exception as error:
        if not (leave_out or isinstance(error, MdcpError)):
            raise
        steps["error"] = f"{type(error).__name__}: {error}"
    finally:
        versions.installed_version = told
        os.environ.pop("MDCP_OOM_FILE", None)
        sys.argv = before
        patches.undo()
        training.reset()
        _clear_megatron()
        if leave_out:
            standins.remove()
    return steps


def _recorder(steps: dict[str, Any]) -> Patch:
    def make(original: Any) -> Any:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            loss = out[0].get("lm loss")
            steps["losses"].append(None if loss is None else float(loss))
            steps["norms"].append(float(out[5]))
            return out

        return train_step

    return Patch(
        name="record",
        target="megatron.training.training:train_step",
        reason="test",
        make=make,
    )


def _evaluation_recorder(steps: dict[str, Any]) -> Patch:
    def make(original: Any) -> Any:
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if out[0] and "lm loss" in out[0]:
                steps["evaluations"].append(float(out[0]["lm loss"]))
            return out

        return evaluate

    return Patch(
        name="record-evaluation",
        target="megatron.training.training:evaluate",
        reason="test",
        make=make,
    )


EXAMPLE = str(Path(__file__).parents[2] / "examples" / "megatron_gpt" / "pretrain.py")
