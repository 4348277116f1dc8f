"""`mdcp launch SCRIPT [arguments of the script]`: run an unmodified trainer script under DCP.

The script is a Megatron-LM `pretrain_gpt.py` or one like it. The adapter's patches are applied to
the importable Megatron, then the script runs as `__main__` in this process with the arguments as
they are; `--mdcp` among them switches DCP on. One process per rank, by the launcher of your choice:

    mdcp launch --nproc-per-node 8 pretrain_gpt.py --mdcp <Megatron's flags>
    torchrun --nproc-per-node 8 -m megatron_dcp launch pretrain_gpt.py --mdcp <Megatron's flags>
    srun --ntasks-per-node 8 mdcp launch pretrain_gpt.py --mdcp <Megatron's flags>
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_dcp.cli.launch_env import slurm_ranks, torchrun_command
from megatron_dcp.errors import ConfigError, MdcpError

USAGE = """usage: mdcp launch [--nproc-per-node N] [--allow-cpu] SCRIPT [arguments of the script]

  --nproc-per-node N   start N ranks on this machine (not under torchrun or srun, which start them)
  --allow-cpu          train on CPU where no GPU is found (gloo, stand-ins for torch.cuda)
  SCRIPT               path of the unmodified training script, e.g. Megatron-LM's pretrain_gpt.py

Under srun, ranks and rendezvous are taken from Slurm's variables.

Among the script's arguments --mdcp switches DCP on; --mdcp-* are listed by SCRIPT --help.
"""


@dataclass(slots=True)
class _Command:
    script: Path
    arguments: list[str]
    cpu: bool = False
    ranks: int | None = None


def _parse(argv: list[str]) -> _Command:
    cpu, ranks, rest = False, None, list(argv)
    while rest and rest[0].startswith("-"):
        flag, _, value = rest.pop(0).partition("=")
        if flag == "--allow-cpu":
            cpu = True
        elif flag == "--nproc-per-node":
            value = value or (rest.pop(0) if rest else "")
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"--nproc-per-node {value!r}: a number of ranks >= 1 is needed")
            ranks = int(value)
        else:
            raise ConfigError(f"unknown option {flag!r} before SCRIPT\n\n{USAGE}")
    if not rest:
        raise ConfigError(f"no SCRIPT given\n\n{USAGE}")
    script = Path(rest[0]).resolve()
    if not script.is_file():
        raise ConfigError(f"SCRIPT {rest[0]!r} is not a file; pass the path of the training script")
    return _Command(script, rest[1:], cpu, ranks)


def main(argv: list[str]) -> int:
    if argv[:1] in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    command = _parse(argv)
    if command.ranks is not None:
        if "RANK" in os.environ or slurm_ranks(os.environ):
            raise ConfigError("--nproc-per-node: the ranks are already started; leave it out")
        again = [*(["--allow-cpu"] if command.cpu else []), str(command.script)]
        words = torchrun_command(command.ranks, [*again, *command.arguments])
        os.execv(words[0], words)
    os.environ.update(slurm_ranks(os.environ))
    # The script's folder comes first, as in `python SCRIPT`: it may hold Megatron itself.
    sys.path.insert(0, str(command.script.parent))
    return run_script(command.script, command.arguments, cpu=command.cpu)


def run_script(script: Path, arguments: list[str], *, cpu: bool) -> int:
    """Patch, run, undo. Errors of ours and failures of the script both end with status 1."""
    from megatron_dcp.adapters.megatron import training
    from megatron_dcp.adapters.megatron.device import prepare_device

    before = list(sys.argv)
    installed = prepare_device(allow_cpu=cpu)
    patches = training.patch_set()
    try:
        patches.apply()
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")
    except MdcpError as error:
        code = training.fail_everywhere(error)
        _leave_group(code)
        return code
    finally:
        sys.argv = before
        patches.undo()
        training.reset()
        if installed is not None:
            installed.undo()
    return 0


def _leave_group(code: int) -> None:
    """End at once when a process group exists: its threads would keep a failed rank alive."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        sys.stderr.flush()
        os._exit(code)
