"""`mdcp launch SCRIPT [arguments of the script]`: run an unmodified trainer script under DCP.

The script is a Megatron-LM `pretrain_gpt.py` or one like it. The adapter's patches are applied to
the importable Megatron, then the script runs as `__main__` in this process with the arguments as
they are; `--mdcp` among them switches DCP on. Start one process per rank as for the script itself:

    torchrun --nproc-per-node 8 -m megatron_dcp launch pretrain_gpt.py --mdcp <Megatron's flags>
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from megatron_dcp.errors import ConfigError, MdcpError

USAGE = """usage: mdcp launch [--allow-cpu] SCRIPT [arguments of the script]

  --allow-cpu   train on CPU where no GPU is found (gloo, stand-ins for torch.cuda)
  SCRIPT        path of the unmodified training script, e.g. Megatron-LM's pretrain_gpt.py

Among the script's arguments --mdcp switches DCP on; --mdcp-* are listed by SCRIPT --help.
"""


def _parse(argv: list[str]) -> tuple[bool, Path, list[str]]:
    cpu, rest = False, list(argv)
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        if flag != "--allow-cpu":
            raise ConfigError(f"unknown option {flag!r} before SCRIPT\n\n{USAGE}")
        cpu = True
    if not rest:
        raise ConfigError(f"no SCRIPT given\n\n{USAGE}")
    script = Path(rest[0]).resolve()
    if not script.is_file():
        raise ConfigError(f"SCRIPT {rest[0]!r} is not a file; pass the path of the training script")
    return cpu, script, rest[1:]


def main(argv: list[str]) -> int:
    if argv[:1] in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    cpu, script, arguments = _parse(argv)
    # The script's folder comes first, as in `python SCRIPT`: it may hold Megatron itself.
    sys.path.insert(0, str(script.parent))
    return run_script(script, arguments, cpu=cpu)


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
