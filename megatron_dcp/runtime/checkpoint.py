"""Exact resume: model, optimizer, scheduler, sampler position, strategy, cost profile.

Random numbers need no state: they follow from the seed that the script gives, the step and the
sample (`runtime.rng`).

A checkpoint is a folder `step-NNNNNNNN` with two files: `tensors.safetensors` (full tensors by
fully qualified name, so it loads at another number of ranks and under another wrapper) and
`state.json` (everything else, and the SHA-256 of both). It is written as `step-NNNNNNNN.part`,
synced, and renamed: a folder without `.part` is whole, whatever was killed when. No pickle.

`torch.distributed.checkpoint.state_dict` gathers sharded parameters; the data set's samples of the
next step follow from the position alone, so digests and losses go on as if nothing had happened.
Full tensors pass through rank 0's memory: for models that do not fit there, let the trainer write
its own sharded checkpoint and store `engine.state_dict()` and `loader.state_dict()` beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from megatron_dcp.dist import gather_bytes
from megatron_dcp.errors import ConfigError, MdcpError
from megatron_dcp.runtime.backend import reshard

if TYPE_CHECKING:
    from megatron_dcp.runtime.engine import Engine
    from megatron_dcp.runtime.loader import StepLoader

SCHEMA = "mdcp.checkpoint/1"
TENSORS, STATE = "tensors.safetensors", "state.json"
_COUNTS, _PAIRS = "mdcp.counts", "mdcp.pairs"  # keys that stand for a mapping in `state.json`
_NAME = re.compile(r"step-(\d{8})")
# Saving: global rank 0 alone gets the tensors, in its CPU memory; the others get nothing.
_SAVE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_LOAD = StateDictOptions(full_state_dict=True)


class CheckpointError(MdcpError):
    """A checkpoint cannot be written or read; names the folder and what is wrong with it."""


def save_checkpoint(
    engine: Engine, loader: StepLoader, directory: str | Path, *, keep: int = 2
) -> Path:
    """Write `<directory>/step-N` after N finished steps; collective over all ranks.

    keep: older whole checkpoints beyond this many are removed, after the new one is in place.
    Raises CheckpointError on every rank alike when rank 0 cannot write; training can go on.
    """
    _check_planes(engine)
    tensors, scalars = _collect(engine)
    folder = Path(directory) / f"step-{loader.position:08d}"
    problem = ""
    if engine.world.rank == 0 and _is_writer(engine):
        body = {
            "schema": SCHEMA,
            "step": loader.position,
            "engine": engine.state_dict(),
            "loader": loader.state_dict(),
            "optimizer": scalars,
            "scheduler": _scheduler_state(engine),
            "scaler": None if engine.scaler is None else engine.scaler.state_dict(),
        }
        try:
            _write(folder, tensors, body)
            _prune(folder.parent, keep)
        except (OSError, ValueError, TypeError) as error:
            shutil.rmtree(_part(folder), ignore_errors=True)
            problem = f"checkpoint {folder} was not written: {error}; the ones before are untouched"
    problems = [b.decode() for b in gather_bytes(engine.world, problem.encode())]
    if found := next((p for p in problems if p), ""):
        raise CheckpointError(found)
    return folder


def load_checkpoint(
    engine: Engine,
    loader: StepLoader,
    directory: str | Path,
    *,
    allow_previous: bool = False,
) -> int | None:
    """Load the newest checkpoint of a folder; returns its step, or None when there is none."""
    found = newest_checkpoint(directory, allow_previous=allow_previous)
    if found is None:
        return None
    folder, body = found
    engine.load_state_dict(body["engine"])
    loader.load_state_dict(body["loader"])
    _restore(engine, folder, body)
    return int(body["step"])


def newest_checkpoint(
    directory: str | Path, *, allow_previous: bool = False
) -> tuple[Path, dict[str, Any]] | None:
    """The folder that a resumed run goes on from and what its `state.json` says, digests checked.

    A damaged newest checkpoint is refused by name; with `allow_previous` the one before is taken,
    which must be asked for because it repeats steps.
    """
    folders = sorted(whole_checkpoints(directory), reverse=True)
    for folder in folders:
        try:
            return folder, _verified(folder)
        except CheckpointError as error:
            if allow_previous and folder != folders[-1]:
                continue
            raise CheckpointError(
                f"{error}. To go on from the checkpoint before it and repeat the steps since, "
                "allow it (allow_previous=True, --allow-previous)"
            ) from error
    return None


def whole_checkpoints(directory: str | Path) -> list[Path]:
    """Finished checkpoints of a folder; unfinished ones (`.part`) do not count."""
    root = Path(directory)
    if not root.is_dir():
        return []
    return [p for p in root.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)]


def _is_writer(engine: Engine) -> bool:
    """Data rank 0 of the first plane writes; the other planes hold other parameters' shards."""
    return engine.world.global_ranks == engine.world.planes[0]


def _check_planes(engine: Engine) -> None:
    """Refuse what would be lost: parameters that only other planes hold."""
    if len(engine.world.planes) == 1:
        return
    placed = any(hasattr(p, "placements") for p in engine.driver.module.parameters())
    if engine.stage_group is not None or not placed:
        raise CheckpointError(
            "the first plane does not hold all parameters (pipeline stages, or tensor parallelism "
            "without DTensor): write them as your trainer does, and store engine.state_dict() and "
            "loader.state_dict() beside them"
        )


def _collect(engine: Engine) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, the optimizer's plain values). Collective for sharded models."""
    model = engine.driver.module
    states: Any = get_model_state_dict(model, options=_SAVE)
    flat: dict[str, Tensor] = {f"model/{n}": x for n, x in states.items()}
    if engine.ema is not None:
        flat |= {f"ema/{n}": x for n, x in engine.ema.full().items()}
    if engine.optimizer is None:
        return flat, {}
    optimizer: Any = get_optimizer_state_dict(model, engine.optimizer, options=_SAVE)
    if not optimizer:
        return flat, {}
    plain: dict[str, Any] = {"groups": optimizer["param_groups"], "state": {}}
    for name, state in optimizer["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                flat[f"optimizer/{name}/{key}"] = value
            else:
                plain["state"].setdefault(name, {})[key] = value
    return flat, plain


def _restore(engine: Engine, folder: Path, body: Mapping[str, Any]) -> None:
    from safetensors.torch import load_file

    tensors = load_file(folder / TENSORS)
    model = engine.driver.module
    named: dict[str, Any] = {
        n.removeprefix("model/"): x for n, x in tensors.items() if n.startswith("model/")
    }
    reshard(model)  # torch cannot load into parameters that an evaluation left gathered
    set_model_state_dict(model, named, options=_LOAD)
    if engine.optimizer is not None:
        state: dict[str, dict[str, Any]] = {
            n: dict(s) for n, s in body["optimizer"]["state"].items()
        }
        for full, x in tensors.items():
            if full.startswith("optimizer/"):
                name, _, key = full.removeprefix("optimizer/").rpartition("/")
                state.setdefault(name, {})[key] = x
        whole: Any = {"state": state, "param_groups": body["optimizer"]["groups"]}
        # Without any tensor (plain SGD) torch finds no device to put full tensors on: none needed.
        options = _LOAD if any(state.values()) else StateDictOptions()
        set_optimizer_state_dict(model, engine.optimizer, whole, options=options)
    if engine.ema is not None:
        averages = {n.removeprefix("ema/"): x for n, x in tensors.items() if n.startswith("ema/")}
        engine.ema.load(averages)
    if engine.scaler is not None and body.get("scaler") is not None:
        engine.scaler.load_state_dict(body["scaler"])
    if engine.scheduler is not None:
        engine.scheduler.load_state_dict(_from_json(body["scheduler"]))


def _scheduler_state(engine: Engine) -> Any:
    if engine.scheduler is None:
        return None
    state = engine.scheduler.state_dict()
    return _to_json({k: v for k, v in state.items() if not callable(v)})


def _to_json(value: Any) -> Any:
    """Mappings with other keys than strings as pairs: JSON would make strings of the keys.

    MultiStepLR counts its milestones by step number, alone or inside SequentialLR.
    """
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value):
            return {k: _to_json(v) for k, v in value.items()}
        kind = _COUNTS if isinstance(value, Counter) else _PAIRS
        return {kind: [[_to_json(k), _to_json(v)] for k, v in value.items()]}
    return [_to_json(v) for v in value] if isinstance(value, (list, tuple)) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    if not isinstance(value, dict):
        return value
    for kind, make in ((_COUNTS, Counter), (_PAIRS, dict)):
        if set(value) == {kind}:
            return make({_from_json(k): _from_json(v) for k, v in value[kind]})
    return {k: _from_json(v) for k, v in value.items()}


def _part(folder: Path) -> Path:
    return folder.with_name(folder.name + ".part")


def _write(folder: Path, tensors: Mapping[str, Tensor], body: dict[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = _part(folder)
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    # safetensors refuses tensors that share memory (tied weights): give each its own.
    own = {n: x.detach().clone().contiguous() for n, x in tensors.items()}
    try:
        save_file(own, part / TENSORS)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    _sync(part / TENSORS)
    body = {**body, "tensors_sha256": _sha256(part / TENSORS)}
    text = json.dumps(body, sort_keys=True)
    stamped = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}
    (part / STATE).write_text(json.dumps(stamped, sort_keys=True))
    _sync(part / STATE)
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verified(folder: Path) -> dict[str, Any]:
    """The body of `state.json` after both digests were checked."""
    try:
        stamped = json.loads((folder / STATE).read_bytes())
        body, stated = stamped["body"], stamped["sha256"]
        text = json.dumps(body, sort_keys=True)
        if hashlib.sha256(text.encode()).hexdigest() != stated:
            raise CheckpointError(f"checkpoint {folder}: {STATE} does not match its digest")
        if body["schema"] != SCHEMA:
            raise CheckpointError(
                f"checkpoint {folder}: schema {body['schema']!r}, this version reads {SCHEMA!r}"
            )
        if _sha256(folder / TENSORS) != body["tensors_sha256"]:
            raise CheckpointError(f"checkpoint {folder}: {TENSORS} does not match its digest")
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder}: {STATE} is damaged: {error!r}") from error
    return dict(body)


def _prune(directory: Path, keep: int) -> None:
    if keep < 1:
        raise ConfigError(f"keep={keep}: at least the newest checkpoint is kept")
    for folder in sorted(whole_checkpoints(directory))[:-keep]:
        shutil.rmtree(folder)
