"""What the packaging tests share: one sdist and one wheel, built as a user would, without ops.

The planner takes half a minute to compile, so it is compiled once.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Built:
    """sdist and wheel files; `tree`: the unpacked sdist with its `build` folder."""

    sdist: Path
    wheel: Path
    tree: Path


def _run(*command, cwd, **env):
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Clone, sdist from the clone, wheel from the sdist alone (no git there)."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no clone to build from")
    folder = tmp_path_factory.mktemp("package")
    _run("git", "clone", "--quiet", str(ROOT), "clone", cwd=folder)
    hook = "from setuptools.build_meta import build_sdist as b; b(__import__('sys').argv[1])"
    _run(sys.executable, "-c", hook, str(folder / "dist"), cwd=folder / "clone",
         MDCP_BUILD_OPS="0")  # fmt: skip
    (sdist,) = (folder / "dist").glob("megatron_dcp-*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked")
    (tree,) = (folder / "unpacked").iterdir()
    _run("bash", str(tree / "scripts/dev/wheel.sh"), str(folder / "wheels"), cwd=folder,
         PYTHON=sys.executable, MDCP_BUILD_OPS="0")  # fmt: skip
    (wheel,) = (folder / "wheels").glob("megatron_dcp-*.whl")
    return Built(sdist=sdist, wheel=wheel, tree=tree)
