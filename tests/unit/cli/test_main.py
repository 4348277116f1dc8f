"""`mdcp` itself: what it says where a part of the installation is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_dcp

WITHOUT_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Absent())
from megatron_dcp.cli.main import main
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "args",
    [["train"], ["profile", "--out", "p.json"], ["bench", "attention"], ["launch", __file__]],
)
def test_commands_that_need_torch_say_so(args, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *args], capture_output=True, text=True, timeout=120,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "this command needs torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_without_unicode_gets_the_table():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dcp", "simulate", "--ranks", "8", "--steps", "1",
         "--batch", "16", "--strategies", "dcp"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tok/s/rank" in done.stdout


def test_a_checkout_that_is_not_built_says_how(tmp_path):
    source = Path(megatron_dcp.__file__).parent
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(source, tmp_path / "megatron_dcp", ignore=ignored)
    # -S: without site-packages, where an editable installation would lend its compiled parts.
    path = [p for p in sys.path if p.endswith("site-packages")]
    code = f"import sys; sys.path += {path!r}\nfrom megatron_dcp.cli.main import main\n"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"{code}raise SystemExit(main(sys.argv[1:]))", "plan",
         "--lengths", "preset:wiki", "--ranks", "8"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "setup.py build_ext --inplace" in done.stderr
    assert "Traceback" not in done.stderr
