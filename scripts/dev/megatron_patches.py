"""Write the insert-only patches for one Megatron-LM tree.

    python scripts/dev/megatron_patches.py TREE TAG     TREE: an unmodified checkout of TAG

For maintainers, when a new tag comes out. Places are found by patterns; one that is not found
exactly as often as it should be is an error. Only line numbers and a digest of upstream's text end
up in the patch.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

PATCHES = Path(__file__).parents[2] / "patches" / "megatron-lm"

FLAGS = """\
    from megatron_dcp.adapters.megatron.flags import add_flags

    parser = add_flags(parser)
"""
REFUSALS = """\
    if getattr(args, "mdcp", False):
        from megatron_dcp.adapters.megatron.training import check_arguments

        check_arguments(args)
"""
SCHEDULE = """\
    if getattr(args, "mdcp", False):
        from megatron_dcp.adapters.megatron.training import runner

        forward_backward_func = runner().wrap(forward_backward_func)
"""
SPEC = """\
        from megatron_dcp.adapters.megatron.training import plan_aware_if_enabled

        transformer_layer_spec = plan_aware_if_enabled(transformer_layer_spec)
"""
RESUME = """\
    if getattr(args, "mdcp", False):
        from megatron_dcp.adapters.megatron.training import take_state

        take_state(checkpoint_args)
"""
# (patch, file, [(pattern of the text to insert after, count, inserted lines)])
PLACES = (
    ("flags", "megatron/training/arguments.py", [
        (r'^def add_megatron_arguments\(.*\):\n\s+"{3,4}[^"]*"{3}\n', 1, FLAGS),
        (r"^def validate_args\(.*\):\n", 1, REFUSALS),
    ]),
    ("schedule", "megatron/training/training.py", [
        (r"^    forward_backward_func = get_forward_backward_func\((?:[^()]*)\)\n", 2, SCHEDULE),
    ]),
    ("resume", "megatron/training/checkpointing.py", [
        (r'^def check_checkpoint_args\(.*\):\n\s+"{3}[^"]*"{3}\n.*get_args\(\)\n', 1, RESUME),
    ]),
    ("spec", "megatron/core/models/gpt/gpt_model.py", [
        (r"(?=^        self\.transformer_layer_spec: ModuleSpec = )", 1, SPEC),
    ]),
)  # fmt: skip


def make_patch(text: str, path: str, places: list[tuple[str, int, str]]) -> str:
    inserts: list[tuple[int, str]] = []
    for pattern, count, new in places:
        found = list(re.finditer(pattern, text, re.MULTILINE))
        if len(found) != count:
            raise SystemExit(f"{path}: {pattern!r} found {len(found)} times, expected {count}")
        inserts += [(text.count("\n", 0, m.end()), new) for m in found]
    lines = [f"mdcp-sha256: {hashlib.sha256(text.encode()).hexdigest()}"]
    lines += [f"--- a/{path}", f"+++ b/{path}"]
    shift = 0
    for after, new in sorted(inserts):
        rows = new.splitlines()
        lines.append(f"@@ -{after},0 +{after + shift + 1},{len(rows)} @@")
        lines += ["+" + row for row in rows]
        shift += len(rows)
    return "\n".join(lines) + "\n"


def main() -> None:
    tree, tag = Path(sys.argv[1]), sys.argv[2]
    folder = PATCHES / tag
    folder.mkdir(parents=True, exist_ok=True)
    for name, path, places in PLACES:
        text = (tree / path).read_text()
        (folder / f"{name}.patch").write_text(make_patch(text, path, places))
        print(folder / f"{name}.patch")


if __name__ == "__main__":
    main()
