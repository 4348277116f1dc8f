"""Source patches on a Megatron-LM checkout: insert-only, zero context, pinned to one tag.

A patch file is a unified diff that `git apply --unidiff-zero` takes, with one more header line:

    mdcp-sha256: <digest of the file that it changes, as the tag has it>

The digest is what context lines would be for, without carrying a line that is not ours. A folder
patches/megatron-lm/<tag>/ is applied as a whole or not at all. No trainer is imported.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_dcp.errors import AdapterError

_HUNK = re.compile(r"^@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@")
DIGEST = "mdcp-sha256: "


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePatch:
    """One file's insertions. hunks: (number of the original line to insert after, lines)."""

    name: str
    path: str
    sha256: str
    hunks: tuple[tuple[int, tuple[str, ...]], ...]

    def inserted(self, lines: list[str]) -> list[str]:
        """The patched file."""
        out, at = [], 0
        for after, new in self.hunks:
            out += lines[at:after] + list(new)
            at = after
        return out + lines[at:]

    def removed(self, lines: list[str]) -> list[str] | None:
        """The file without our lines, or None where they do not stand as the patch puts them."""
        out, at, shift = [], 0, 0
        for after, new in self.hunks:
            begin = after + shift
            if lines[begin : begin + len(new)] != list(new):
                return None
            out += lines[at:begin]
            at = begin + len(new)
            shift += len(new)
        return out + lines[at:]


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_patch(file: Path) -> SourcePatch:
    """Parse a patch file; AdapterError when it is not insert-only with zero context."""
    path, sha256 = "", ""
    hunks: list[tuple[int, list[str]]] = []
    for number, line in enumerate(file.read_text().splitlines(keepends=True), 1):
        found = _HUNK.match(line)
        if line.startswith(DIGEST):
            sha256 = line[len(DIGEST) :].strip()
        elif line.startswith("+++ b/"):
            path = line[6:].strip()
        elif line.startswith("--- a/") or (not path and not found):
            continue
        elif found:
            hunks.append((int(found[1]), []))
        elif line.startswith("+") and hunks:
            hunks[-1][1].append(line[1:])
        else:
            raise AdapterError(
                f"{file}, line {number}: {line.rstrip()!r} is neither a zero-context hunk header "
                "nor an inserted line; patches insert only"
            )
    if not (path and sha256 and hunks):
        raise AdapterError(f"{file}: looked for '+++ b/', '{DIGEST}' and hunks, found not all")
    return SourcePatch(
        name=file.name, path=path, sha256=sha256, hunks=tuple((n, tuple(x)) for n, x in hunks)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeState:
    """One patch against one tree: `clean`, `applied`, or what does not fit."""

    patch: SourcePatch
    state: str


def _state(patch: SourcePatch, root: Path) -> str:
    file = root / patch.path
    if not file.is_file():
        return "missing"
    try:
        lines = file.read_bytes().decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        return "different"
    if _digest(lines) == patch.sha256:
        return "clean"
    original = patch.removed(lines)
    if original is not None and _digest(original) == patch.sha256:
        return "applied"
    return "different"


def find_tag(patches: Path, root: Path) -> tuple[str, list[TreeState]]:
    """The tag whose files this tree has (clean or patched), and the state of each patch.

    Raises AdapterError naming the tags that were tried and the first file of each that differs.
    """
    tried = []
    for folder in sorted(p for p in patches.iterdir() if p.is_dir()):
        states = [
            TreeState(patch=p, state=_state(p, root))
            for p in map(read_patch, sorted(folder.glob("*.patch")))
        ]
        bad = next((s for s in states if s.state in ("missing", "different")), None)
        if states and bad is None:
            return folder.name, states
        if bad is not None:
            tried.append(f"{folder.name} ({bad.patch.path} is {bad.state})")
    raise AdapterError(
        f"no patch set fits {root}: tried {', '.join(tried) or 'none'}. Check out one of these "
        "tags without local changes in these files, or use `mdcp launch`, which needs no patch"
    )


def rewrite(root: Path, states: list[TreeState], *, apply: bool) -> list[str]:
    """Insert or take out all patches; every new text is made before the first file is written."""
    wanted = "clean" if apply else "applied"
    texts = {}
    for s in states:
        if s.state != wanted:
            continue
        lines = (root / s.patch.path).read_bytes().decode().splitlines(keepends=True)
        new = s.patch.inserted(lines) if apply else s.patch.removed(lines)
        assert new is not None  # `_state` has seen that it fits
        texts[s.patch.path] = "".join(new)
    for path, text in texts.items():
        (root / path).write_bytes(text.encode())
    return list(texts)
