"""The public API as stubs, one file per module, from what docs/api.md documents.

    python scripts/dev/api.py          writes tests/data/api/*.pyi

tests/unit/docs/test_api.py compares the sources with these files and fails on what would break a
caller. After an intended break: write them anew, and say so in the changelog.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "tests" / "data" / "api"
_MADE = ("__init__", "__post_init__")  # of dataclasses: they follow from the fields
_DIRECTIVE = re.compile(r"^\.\. auto(function|class|module):: (\S+)\n(?:   :members:(.*)\n)?", re.M)


def load() -> griffe.Module:
    """The package, read and not imported."""
    found = griffe.load("megatron_dcp", search_paths=[str(ROOT)], resolve_aliases=True)
    assert isinstance(found, griffe.Module)
    return found


def find(package: griffe.Module, path: str) -> griffe.Object:
    """The object at a dotted path that begins with the package's name."""
    found = package[path.partition(".")[2]]
    return found.final_target if isinstance(found, griffe.Alias) else found


def documented(package: griffe.Module) -> Iterator[tuple[str, griffe.Object, list[str] | None]]:
    """(module, object, documented members or None for all) of docs/api.md, in its order."""
    for kind, path, members in _DIRECTIVE.findall((ROOT / "docs/api.md").read_text()):
        found = find(package, path)
        if kind != "module":
            chosen = [m.strip() for m in members.split(",") if m.strip()]
            yield found.module.path, found, chosen or None
            continue
        for inner in found.members.values():
            if inner.is_public and not inner.is_alias and (inner.is_class or inner.is_function):
                yield path, inner, None


def stub(found: griffe.Object, members: list[str] | None) -> str:
    """One function or class without bodies and docstrings."""
    if isinstance(found, griffe.Function):
        return f"def {found.signature()}: ...\n"
    assert isinstance(found, griffe.Class)
    bases = ", ".join(str(b) for b in found.bases)
    lines = [f"@{d.value}" for d in found.decorators]
    lines.append(f"class {found.name}({bases}):" if bases else f"class {found.name}:")
    body = []
    for name, member in found.members.items():
        if member.is_alias or not member.is_public or name in _MADE:
            continue
        if members is not None and name not in members:
            continue
        if isinstance(member, griffe.Function):
            body += [f"    @{d.value}" for d in member.decorators]
            inner = member.signature().partition("(")[2]  # without self
            separator = "" if inner.startswith(")") else ", "
            body.append(f"    def {name}(self{separator}{inner}: ...")
        elif isinstance(member, griffe.Attribute) and member.annotation is not None:
            value = f" = {member.value}" if member.value is not None else ""
            body.append(f"    {name}: {member.annotation}{value}")
    return "\n".join([*lines, *(body or ["    ..."])]) + "\n"


def stubs() -> dict[str, str]:
    """Stub text by module."""
    out: dict[str, str] = {}
    for module, found, members in documented(load()):
        text = out.setdefault(module, "from dataclasses import dataclass, field\n")
        out[module] = text + "\n" + stub(found, members)
    return out


def main() -> None:
    STUBS.mkdir(parents=True, exist_ok=True)
    for old in STUBS.glob("*.pyi"):
        old.unlink()
    for module, text in stubs().items():
        (STUBS / f"{module}.pyi").write_text(text)


if __name__ == "__main__":
    main()
