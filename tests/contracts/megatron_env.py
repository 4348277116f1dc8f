"""The interpreter with the second megatron-core, and pools of workers that run on it."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def own_python() -> str:
    """Path of the venv's python; builds the venv the first time (seconds)."""
    script = ROOT / "scripts" / "env_megatron.sh"
    done = subprocess.run(
        ["bash", str(script), sys.executable], capture_output=True, text=True, timeout=240
    )
    if done.returncode:
        raise RuntimeError(f"{script} failed with {done.returncode}: {done.stderr}")
    return done.stdout.strip()
