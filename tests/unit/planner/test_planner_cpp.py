"""The C++ planner alone: fuzz, sanitizers, and the instruction count of one large plan.

Everything here is compiled by tests/cpp/Makefile with g++ only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LENGTHS = ROOT / "tests" / "data" / "lengths"
# Instructions of planning wiki_4096 on 1024 ranks (g++ -O2), regression bar: 5 % slack.
INSTRUCTIONS = 19_497_659
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def build(folder: Path, mode: str) -> Path:
    command = ["make", "-s", "-j2", "-C", str(ROOT / "tests" / "cpp"), f"BUILD={folder}"]
    subprocess.run([*command, f"MODE={mode}"], check=True, timeout=280)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("plain"), "plain")


def output(*command: object) -> str:
    run = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_fuzz(plain: Path) -> None:
    text = output(plain / "planner_fuzz", 0, 20_000)
    counts = [int(x) for x in re.findall(r"\d+", text)]
    assert counts[0] == 20_000
    assert counts[1] > 15_000
    assert counts[1] + counts[2] == 20_000


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_fuzz_a_million(plain: Path) -> None:
    for first in range(0, 1_000_000, 50_000):
        assert output(plain / "planner_fuzz", first, 50_000).startswith("50000 cases")


def test_sanitizers(tmp_path: Path) -> None:
    folder = build(tmp_path, "sanitize")
    assert output(folder / "planner_fuzz", 0, 300).startswith("300 cases")
    line = output(folder / "planner_driver", "plan", LENGTHS / "wiki_512.txt", 512, 64, 8, 1, 1)
    assert line.startswith("512/64 makespan_us 1")


def test_instruction_count(plain: Path, tmp_path: Path) -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("needs valgrind (callgrind) to count instructions")
    out = tmp_path / "callgrind.out"
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}",
               "--toggle-collect=mdcp::make_plan*", plain / "planner_driver",
               "plan", LENGTHS / "wiki_4096.txt", 4096, 1024, 8, 1, 1]  # fmt: skip
    output(*command)
    found = re.search(r"^summary: (\d+)", out.read_text(), re.MULTILINE)
    assert found is not None
    count = int(found.group(1))
    assert count <= 1.05 * INSTRUCTIONS, f"{count} instructions, the record is {INSTRUCTIONS}"
