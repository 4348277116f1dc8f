"""`mdcp profile`: fit a cost profile on this device, for your own model. Run it under torchrun.

    torchrun --nproc-per-node 2 -m megatron_dcp profile --model gpt --out profile.json

--model: `gpt` (the reference GPT of `mdcp train`), `hf:PATH` (a Transformers config: a folder or a
config.json; weights are random), `megatron:FILE` (JSON with the fields of Megatron's
TransformerConfig, see adapters/megatron/profile.py), or `package.module:function`, a function
without arguments that returns an `nn.Module` which maps (input_ids [t], position_ids [t]) to logits
[t, vocab], calls `mdcp.attention`, and has a `config` with the usual attribute names.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from megatron_dcp.cli.outputs import check_folder, write_whole
from megatron_dcp.cost import budget_bytes
from megatron_dcp.errors import ConfigError

if TYPE_CHECKING:
    from megatron_dcp.cost.profile import ModelShape
    from megatron_dcp.cost.profiling import Fitted
    from megatron_dcp.runtime.profile import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Measure microbatches of a model at two depths and fit a cost profile."""

    out: Path
    """Profile file to write; points go to OUT with suffix .points.jsonl and are resumed."""
    model: str = "gpt"
    """gpt | hf:PATH | megatron:FILE | package.module:function."""
    name: str = ""
    """Name of the profile; default from the model."""
    layers: str = ""
    """Attribute path of the list of layers; default `layers`, for hf `model.layers`."""
    max_tokens: int = 2048
    """Most tokens per rank of a measured microbatch."""
    memory_gb: float | None = None
    """Budget per rank that the profile carries, 1e9 bytes; default 90 % of the device's."""
    repeats: int = 5
    rounds: int = 3
    """How often the grid is measured while --limit-s lasts; every case keeps its best."""
    limit_s: float = 120.0
    """After this time no further round begins, and in the first every case runs once only."""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu: processor time in cases without communication, for a shared machine."""
    device: str = "auto"
    """auto | cpu | cuda."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    restart: bool = False
    """Forget the points of an earlier call."""


def main(argv: list[str]) -> int:
    options = tyro.cli(ProfileOptions, args=argv, prog="mdcp profile", description=__doc__)
    if options.out.suffix != ".json":
        raise ConfigError(f"--out {options.out}: a profile file ends in .json")
    for name in ("max_tokens", "repeats", "rounds"):
        if getattr(options, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(options, name)}; use at least 1"
            )
    if not options.limit_s >= 0:
        raise ConfigError(f"--limit-s is {options.limit_s}; use at least 0")
    if options.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {options.device!r}: use auto, cpu or cuda")
    if options.memory_gb is not None:
        budget_bytes(options.memory_gb)
    check_folder(options.out.absolute().parent)
    return profile(options)


def profile(options: ProfileOptions) -> int:
    import torch
    import torch.distributed as dist

    from megatron_dcp.cost import dumps
    from megatron_dcp.dist import DataWorld
    from megatron_dcp.plan import Topology
    from megatron_dcp.runtime.memory import keep_memory
    from megatron_dcp.runtime.profile import check_same, profile_model

    device = _device(options.device)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cpu":
        keep_memory()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    world = DataWorld(device=device)
    points = options.out.with_suffix(".points.jsonl")
    if options.restart and world.rank == 0:
        points.unlink(missing_ok=True)
    subject = make_subject(options, device)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    fitted = profile_model(
        world, subject, Topology(data_ranks=world.size, ranks_per_node=local),
        name=options.name or options.model.replace(":", "-").replace("/", "-"),
        max_tokens=options.max_tokens, points_file=points, repeats=options.repeats,
        rounds=options.rounds, limit_s=options.limit_s, clock=options.clock,
        budget_bytes=_budget(options.memory_gb, device), progress=_bar,
    )  # fmt: skip
    check_same(world, fitted)
    if world.rank == 0:
        write_whole(options.out, dumps(fitted.profile).encode())
        _figure(fitted, options.out.with_suffix(".png"))
        print(_summary(fitted, options.out))
    if several:
        world.close()
        dist.destroy_process_group()
    return 0


def _bar(done: int, total: int, what: str) -> None:
    """A progress bar on stderr, one line per case."""
    filled = 24 * done // total
    print(f"[{'#' * filled}{'.' * (24 - filled)}] {done}/{total} {what}", file=sys.stderr,
          flush=True)  # fmt: skip


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no CUDA device; use --device cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(name)


def _budget(memory_gb: float | None, device: Any) -> int:
    import torch

    if memory_gb is not None:
        return budget_bytes(memory_gb)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1] * 0.9)
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return int(pages * size * 0.9) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _figure(fitted: Fitted, path: Path) -> None:
    from megatron_dcp.observe import png

    series: dict[str, list[tuple[float, float]]] = {}
    for group, predicted, measured in fitted.predictions:
        series.setdefault(group, []).append((predicted / 1e3, measured / 1e3))
    png.scatter(series, path, f"Measured against predicted: {fitted.profile.name}")


def _summary(fitted: Fitted, path: Path) -> str:
    p = fitted.profile
    lines = [
        f"{path}: {p.fit['points']} points, median error {p.fit['median_error']:.1%}",
        f"  linear {p.linear_us_per_token:.3f} us/token, attention {p.attn_us_per_pair:.6f} "
        f"us/pair, overhead {p.overhead_us.async_:.0f} us",
        "  median errors: " + ", ".join(f"{k} {v:.1%}" for k, v in fitted.errors.items()),
    ]
    return "\n".join(lines)


def make_subject(options: ProfileOptions, device: Any) -> Subject:
    """The model to profile and how its loss is computed."""
    kind, _, rest = options.model.partition(":")
    if options.model == "gpt":
        return _gpt(options, device)
    if kind == "hf" and rest:
        return _hf(rest, options, device)
    if kind == "megatron" and rest:
        return _megatron(rest, options, device)
    if rest:
        return _function(options, device)
    raise ConfigError(
        f"--model {options.model!r}: use gpt, hf:PATH, megatron:FILE or package.module:function"
    )


def _dtype(options: ProfileOptions) -> Any:
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]


def _loss(model: Any, ids: Any, positions: Any, labels: Any) -> Any:
    import torch.nn.functional as F

    logits = model(ids, positions)
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def shape_of(config: Any, element_bytes: int) -> ModelShape:
    """Heads and sizes from a model's config, by the usual attribute names."""
    from megatron_dcp.cost.profile import ModelShape

    def read(*names: str) -> int:
        for name in names:
            if getattr(config, name, None) is not None:
                return int(getattr(config, name))
        raise ConfigError(f"the model's config has none of {', '.join(names)}; found {config!r}")

    heads, hidden = read("heads", "num_attention_heads", "n_head"), read("hidden", "hidden_size")
    has_kv = any(getattr(config, n, None) for n in ("kv_heads", "num_key_value_heads"))
    return ModelShape(
        layers=read("layers", "num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=read("kv_heads", "num_key_value_heads") if has_kv else heads,
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        hidden=hidden,
        vocab=read("vocab", "vocab_size"),
        element_bytes=element_bytes,
    )


def _module_subject(model: Any, config: Any, layers: str, options: ProfileOptions) -> Subject:
    from megatron_dcp.runtime.profile import Subject, truncated

    size = 2 if options.dtype == "bfloat16" else 4
    return Subject(
        shape=shape_of(config, size), build=truncated(model, layers), loss=_loss, layers=layers
    )


def _gpt(options: ProfileOptions, device: Any) -> Subject:
    import torch

    from megatron_dcp.cli.train.model import Gpt, GptConfig

    torch.manual_seed(0)
    config = GptConfig()
    model = Gpt(config).to(device=device, dtype=_dtype(options))
    return _module_subject(model, config, options.layers or "layers", options)


def _function(options: ProfileOptions, device: Any) -> Subject:
    module, _, name = options.model.partition(":")
    try:
        made = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model {options.model!r}: {error}") from error
    if not hasattr(made, "config"):
        raise ConfigError(f"--model {options.model!r}: the model has no attribute `config`")
    model = made.to(device=device, dtype=_dtype(options))
    return _module_subject(model, made.config, options.layers or "layers", options)


def _megatron(path: str, options: ProfileOptions, device: Any) -> Subject:
    # By name: `cli` and `adapters` stand side by side.
    adapter: Any = import_module("megatron_dcp.adapters.megatron.profile")
    made: Subject = adapter.make_subject(path, device=device, dtype=_dtype(options))
    return made


def _hf(path: str, options: ProfileOptions, device: Any) -> Subject:
    try:
        import transformers

        # By name: `cli` and `adapters` stand side by side, and it registers the attention.
        import_module("megatron_dcp.adapters.hf")
    except ImportError as error:
        raise ConfigError(f"--model hf:...: {error}; pip install 'megatron-dcp[hf]'") from error
    from torch import nn

    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model hf:{path}: {error}") from error
    # transformers ships no types for its factories
    make: Any = transformers.AutoModelForCausalLM.from_config
    inner = make(config, attn_implementation="megatron_dcp")

    class Packed(nn.Module):
        """[t] ids and positions in, [t, V] logits out."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: Any, positions: Any) -> Any:
            return self.inner(
                input_ids=ids[None], position_ids=positions[None], use_cache=False
            ).logits[0]

    model = Packed().to(device=device, dtype=_dtype(options))
    return _module_subject(model, config, "inner." + (options.layers or "model.layers"), options)
