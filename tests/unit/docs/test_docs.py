"""The documents: links lead somewhere, shell commands parse, tests named in tables exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    *sorted(ROOT.glob("*.md")), ROOT / "docker/README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in p.parts),
]  # fmt: skip
COMMAND = re.compile(r"^    (?:bash|mdcp|sbatch|scripts/|docker|torchrun|python) ?.*$", re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_resolve(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), target


def anchor(heading):
    """As GitHub and MyST make it from a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_headings_resolve(page):
    for target, name in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text()):
        other = (page.parent / target) if target else page
        headings = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
        assert name in [anchor(h) for h in headings], f"{target}#{name}"


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("sphinx", reason="sphinx is not installed (pip install sphinx furo)")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html",
         str(ROOT / "docs"), str(tmp_path)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    page = (tmp_path / "api.html").read_text()
    assert "megatron_dcp.adapters.torch.initialize" in page
    assert "global_batch_size" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_shell_commands_parse(page):
    text = page.read_text()
    # An indented command goes on over the lines that end with a backslash.
    found = [
        m[0] for m in re.finditer(COMMAND.pattern + r"(?<!\\)", text.replace("\\\n", " "), re.M)
    ]
    found += re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S)
    for command in found:
        done = subprocess.run(
            [shutil.which("bash"), "-n"], input=command, text=True, capture_output=True, timeout=20
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


@pytest.mark.parametrize(
    ("page", "least"), [("docs/reliability.md", 25), ("docs/integrations/traps.md", 50)]
)
def test_every_fault_and_trap_names_a_test_that_exists(page, least):
    text = (ROOT / page).read_text()
    named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", text)
    named += [
        (f"tests/contracts/{file}", name)
        for file, name in re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    ]
    assert len(named) >= least
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), (file, name)


def test_every_reported_fault_is_listed_and_has_its_test():
    page = (ROOT / "docs/reliability.md").read_text()
    source = (ROOT / "tests/distributed/test_reported_faults.py").read_text()
    rows = re.findall(r"^\| (\d+) \| .* \| `(test_(\d\d)_\w+)` \|$", page, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 16))
    for number, name, own in rows:
        assert int(own) == int(number)
        assert f"def {name}(" in source


def test_the_readme_is_short_and_starts_with_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    assert text.index("scripts/quickstart.sh") < text.index("scripts/test.sh")
