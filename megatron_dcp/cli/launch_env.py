"""Which processes `mdcp launch` runs in: those of a launcher, its own torchrun, or Slurm's tasks.

torchrun sets RANK and the rest. `srun` starts tasks without them; they follow from Slurm's own
variables, so that `srun ... mdcp launch SCRIPT` works with one task per rank.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping

from megatron_dcp.errors import ConfigError


def torchrun_command(ranks: int, arguments: list[str]) -> list[str]:
    """`mdcp launch ARGUMENTS` on so many ranks of this machine; again when out of memory."""
    return [
        sys.executable, "-m", "megatron_dcp.cli.elastic", "--standalone", "--nproc-per-node",
        str(ranks), "-m", "megatron_dcp", "launch", *arguments,
    ]  # fmt: skip


def slurm_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """torch.distributed's variables for a task that srun started; empty where there is nothing to
    add (not under srun, a single task, or a launcher has set them).

    The port is the one of scripts/launch/slurm.sbatch: 20000 + job id % 20000, or MDCP_PORT. The
    first host of the step is the rendezvous (its NodeAddr, where its name is no host's), or
    MASTER_ADDR where it is set.
    """
    tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1"))
    if "RANK" in env or "SLURM_PROCID" not in env or tasks == "1":
        return {}
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    port = 20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_tasks_here(env)),
        "MASTER_ADDR": env.get("MASTER_ADDR") or _address(_first_host(nodes)),
        "MASTER_PORT": env.get("MASTER_PORT") or env.get("MDCP_PORT") or str(port),
    }


def _address(node: str) -> str:
    """What the others connect to. A node's name need not be its host's: then Slurm's NodeAddr,
    asked for only there, because every rank would ask."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        if shutil.which("scontrol") is None:
            return node
    command = ["scontrol", "show", "node", node, "--oneliner"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    found = re.search(r"\bNodeAddr=(\S+)", told)
    return found[1] if found else node


def _tasks_here(env: Mapping[str, str]) -> int:
    """Tasks on this node, from `8(x2),4`: 8 on each of two nodes, 4 on the third."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE is {text!r}: not of the form 8(x2),4")
        counts += [int(found[1])] * int(found[2] or 1)
    node = int(env.get("SLURM_NODEID", "0"))
    if node >= len(counts):
        raise ConfigError(f"SLURM_NODEID is {node}, SLURM_TASKS_PER_NODE {text!r} names fewer")
    return counts[node]


def _first_host(nodes: str) -> str:
    """Of a Slurm list such as `gpu[03-05,9],login1`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    if found is None:
        raise ConfigError(f"the Slurm node list is {nodes!r}: no host in it; set MASTER_ADDR")
    return found[1] + (found[2] or "") + found[3]
