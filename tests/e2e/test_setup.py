"""scripts/env.sh: what it says where system packages are missing. It never calls sudo."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "dirname", "sha256sum", "cut", "cat")


def set_up(tmp_path, python=None):
    """Run the set-up of group `base` with nothing but a few tools on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    if python is not None:
        (folder / "python3").write_text(python)
        (folder / "python3").chmod(0o755)
    return subprocess.run(
        [str(folder / "bash"), "-c", f"set -eu; . {ROOT}/scripts/env.sh; mdcp_env base"],
        env={"PATH": str(folder), "HOME": str(tmp_path), "MDCP_VENV": str(tmp_path / "venv")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_missing_compiler_is_named(tmp_path):
    real = f'#!{shutil.which("bash")}\nexec {sys.executable} "$@"\n'
    done = set_up(tmp_path, real)
    assert done.returncode == 1
    assert "missing system packages (Debian and Ubuntu names): g++" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_headers_and_venv_are_named_together(tmp_path):
    """A python whose module and header checks fail, as Debian's without python3-venv and -dev."""
    text = f"""#!{shutil.which("bash")}
case "$*" in *ensurepip*|*sysconfig*) exit 1 ;; esac
exec {sys.executable} "$@"
"""
    done = set_up(tmp_path, text)
    assert "g++ python3-venv python3-dev. Install them, then run this again." in done.stderr
    assert done.returncode == 1


def test_a_missing_python_is_named(tmp_path):
    done = set_up(tmp_path)
    assert done.returncode == 1
    assert "no Python >= 3.11 found; install one" in done.stderr


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").rglob("*.sh")), ids=os.path.basename)
def test_no_script_calls_sudo(script):
    lines = [x for x in script.read_text().splitlines() if not x.lstrip().startswith("#")]
    assert not [x for x in lines if "sudo " in x]
