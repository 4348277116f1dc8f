"""sdist and wheel: what a user without torch gets from `pip install megatron-dcp`."""

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.timeout(540)


def closure(names):
    """Distributions that installing `names` brings, by the requirements they state."""
    found, todo = {}, list(names)
    while todo:
        name = todo.pop()
        if name.lower() in found:
            continue
        found[name.lower()] = dist = metadata.distribution(name)
        for text in dist.requires or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                todo.append(need.name)
    return list(found.values())


def link_in(dist, folder):
    """The files of an installed distribution, by links, as if pip had put them there."""
    base = Path(str(dist.locate_file("")))
    for top in {Path(str(f)).parts[0] for f in dist.files or []} - {"..", "__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(base / top)


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory):
    """A venv with this wheel and what it requires, and nothing else; no torch."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", "--no-deps",
         str(built.wheel)],
        check=True, timeout=120,
    )  # fmt: skip
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
        lines = wheel.read(name).decode().split("\n\n")[0].splitlines()
    needs = [Requirement(x.split(":", 1)[1]) for x in lines if x.startswith("Requires-Dist:")]
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for dist in closure([n.name for n in needs if n.marker is None]):
        link_in(dist, site)
    return folder / "venv" / "bin"


def run(clean, *words, cwd):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [str(clean / words[0]), *words[1:]],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_sdist_holds_what_a_build_needs(built):
    with tarfile.open(built.sdist) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc/planner/search.h",
                 "csrc/ops/module.cc", "megatron_dcp/py.typed",
                 "scripts/launch/slurm.sbatch"):  # fmt: skip
        assert name in names


def test_the_version_comes_from_git_and_survives_the_sdist(built):
    assert built.wheel.name.split("-")[1] == built.sdist.name.removesuffix(".tar.gz").split("-")[1]
    assert "unknown" not in built.wheel.name
    assert not built.wheel.name.startswith("megatron_dcp-0.0.0")


def test_the_wheel_has_the_planner_types_and_presets(built):
    with zipfile.ZipFile(built.wheel) as wheel:
        names = wheel.namelist()
    assert any(n.startswith("megatron_dcp/_planner.") and n.endswith(".so") for n in names)
    for name in ("megatron_dcp/py.typed", "megatron_dcp/_planner.pyi"):
        assert name in names
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/"))]


def test_the_wheel_is_a_manylinux_one_and_brings_no_library(built):
    assert re.search(r"-manylinux_2_\d+_\w+\.whl$", built.wheel.name), built.wheel.name
    with zipfile.ZipFile(built.wheel) as wheel:
        assert not [n for n in wheel.namelist() if ".libs/" in n]
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(built.wheel)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "manylinux_2_" in shown.stdout


def test_plan_simulate_and_doctor_run_without_torch(clean, tmp_path):
    done = run(clean, "python", "-c", "import torch", cwd=tmp_path)
    assert "ModuleNotFoundError" in done.stderr, "the venv is not clean"

    (tmp_path / "lengths.txt").write_text("\n".join(str(100 * (i % 40 + 1)) for i in range(64)))
    done = run(clean, "mdcp", "plan", "--lengths", "lengths.txt", "--ranks", "8", "--json",
               cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == "mdcp.plan/1"

    done = run(clean, "mdcp", "simulate", "--lengths", "preset:wiki", "--ranks", "8", "--steps",
               "1", "--batch", "32", "--strategies", "static,dcp", "--json",
               cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["strategies"]) == {"static", "dcp"}

    done = run(clean, "mdcp", "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["planner"]["usable"]
    assert not found["torch"]["usable"]
    assert found["megatron_dcp"] == metadata_version(clean, tmp_path)


def metadata_version(clean, cwd):
    return run(clean, "mdcp", "--version", cwd=cwd).stdout.strip()


def test_an_older_torch_is_named_before_anything_is_compiled(tmp_path):
    (tmp_path / "torch.py").write_text('__version__ = "2.9.0a0+50eac811a6.nv25.09"')
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "MDCP_BUILD_OPS": "1"}, timeout=300,
        capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "torch 2.9.0a0+50eac811a6.nv25.09 found" in done.stderr
    assert "torch 2.10." in done.stderr


@pytest.mark.nightly
def test_the_train_job_runs_from_a_wheel_with_the_ops(clean, built, tmp_path):
    """The same venv with a wheel that has the ops, and torch beside it."""
    subprocess.run(
        ["bash", str(built.tree / "scripts/dev/wheel.sh"), str(tmp_path / "wheels")],
        env={**os.environ, "PYTHON": sys.executable, "MDCP_BUILD_OPS": "1"},
        check=True, timeout=500,
    )  # fmt: skip
    (wheel,) = (tmp_path / "wheels").glob("*manylinux*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--python", str(clean / "python"), "install",
         "--no-deps", "--force-reinstall", str(wheel)],
        check=True, timeout=120,
    )  # fmt: skip
    (site,) = (clean.parent / "lib").glob("python*/site-packages")
    for dist in closure(["torch", "safetensors"]):
        link_in(dist, site)
    done = run(
        clean, "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "megatron_dcp", "train", "--repeats", "1", "--max-length", "512", "--global-batch",
        "6", "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert set(json.loads((tmp_path / "run/summary.json").read_text())["strategies"]) == {
        "packed:2", "static", "dcp",
    }  # fmt: skip
