"""`mdcp patch`: applied as a whole or not at all, and taken out without a trace."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from megatron_dcp.adapters.megatron.source_patch import read_patch
from megatron_dcp.cli.main import main

PATCHES = Path(__file__).parents[3] / "patches" / "megatron-lm"
TEXT = "one\ntwo\nthree\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of two files and a patch set that fits it."""
    for name in ("a", "b"):
        file = tmp_path / "tree" / "megatron" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TEXT + name + "\n")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        folder = tmp_path / "patches" / "v1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.patch").write_text(
            f"mdcp-sha256: {digest}\n--- a/megatron/{name}.py\n+++ b/megatron/{name}.py\n"
            "@@ -1,0 +2,2 @@\n+ours\n+\n@@ -3,0 +6,1 @@\n+last\n"
        )
    return tmp_path / "tree"


def patch(action: str, tree: Path) -> int:
    return main(["patch", action, str(tree), "--patches", str(tree.parent / "patches")])


def contents(tree: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(tree.rglob("*.py"))}


def test_apply_then_revert_leaves_every_byte(tree: Path) -> None:
    before = contents(tree)
    assert patch("check", tree) == 0
    assert contents(tree) == before
    assert patch("apply", tree) == 0
    assert (tree / "megatron" / "a.py").read_text() == "one\nours\n\ntwo\nthree\nlast\na\n"
    assert patch("check", tree) == 0
    assert patch("revert", tree) == 0
    assert contents(tree) == before


def test_a_file_that_is_no_text_is_another_tree(tree: Path, capsys: pytest.CaptureFixture[str]):
    (tree / "megatron" / "a.py").write_bytes(b"\xff\xfe\x00")
    assert patch("apply", tree) == 1
    assert "a.py" in capsys.readouterr().err


def test_git_applies_the_same_text(tree: Path) -> None:
    file = tree.parent / "patches" / "v1" / "a.patch"
    done = subprocess.run(["git", "apply", "--unidiff-zero", str(file)], cwd=tree, check=False)
    assert done.returncode == 0
    by_git = (tree / "megatron" / "a.py").read_text()
    subprocess.run(["git", "apply", "--unidiff-zero", "-R", str(file)], cwd=tree, check=True)
    assert patch("apply", tree) == 0
    assert (tree / "megatron" / "a.py").read_text() == by_git


@pytest.mark.parametrize("action", ["check", "apply", "revert"])
def test_a_changed_tree_is_refused_and_left_alone(
    tree: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "megatron" / "b.py").write_text("other\n")
    before = contents(tree)
    assert patch(action, tree) == 1
    assert "v1 (megatron/b.py is different)" in capsys.readouterr().err
    assert contents(tree) == before


def test_twice_is_an_error(tree: Path) -> None:
    assert patch("revert", tree) == 1
    assert patch("apply", tree) == 0
    assert patch("apply", tree) == 1


def test_a_folder_without_megatron_is_bad_usage(tmp_path: Path) -> None:
    assert main(["patch", "check", str(tmp_path)]) == 2


@pytest.mark.parametrize("file", sorted(PATCHES.glob("*/*.patch")), ids=lambda p: p.parent.name)
def test_shipped_patches_insert_our_lines_alone(file: Path) -> None:
    found = read_patch(file)
    assert sum(len(lines) for _, lines in found.hunks) <= 50
    assert len(file.read_text().splitlines()) <= 50
    text = "".join(line for _, lines in found.hunks for line in lines)
    assert "megatron_dcp" in text
    assert len(found.sha256) == 64


def test_every_tag_has_all_four() -> None:
    folders = [p for p in PATCHES.iterdir() if p.is_dir()]
    assert len(folders) >= 5
    for folder in folders:
        names = sorted(p.stem for p in folder.glob("*.patch"))
        assert names == ["flags", "resume", "schedule", "spec"]
