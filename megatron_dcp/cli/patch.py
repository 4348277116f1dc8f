"""`mdcp patch check|apply|revert DIR`: the source patches on a Megatron-LM checkout.

For people who want the --mdcp flags in their own tree; `mdcp launch` needs no patch. A tree that no
patch set fits is refused before a file is touched; revert leaves the files as they were, byte for
byte.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

from megatron_dcp.errors import AdapterError, ConfigError

# Next to the package in a source tree; `--patches` names another folder.
PATCHES = Path(__file__).parents[2] / "patches" / "megatron-lm"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="mdcp patch", description=__doc__)
    p.add_argument("action", choices=["check", "apply", "revert"])
    p.add_argument("directory", type=Path, metavar="DIR", help="a Megatron-LM checkout")
    p.add_argument("--patches", type=Path, default=PATCHES, help="folder with one per tag")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if not (args.directory / "megatron").is_dir():
        raise ConfigError(f"{args.directory}: looked for a folder 'megatron' in it, found none")
    if not args.patches.is_dir():
        raise ConfigError(f"no patches at {args.patches}; pass --patches DIR of a source checkout")
    engine = import_module("megatron_dcp.adapters.megatron.source_patch")
    tag, states = engine.find_tag(args.patches, args.directory)
    changed = []
    if args.action != "check":
        wanted = "clean" if args.action == "apply" else "applied"
        if all(s.state != wanted for s in states):
            state = states[0].state
            raise AdapterError(f"nothing to {args.action}: {args.directory} ({tag}) is {state}")
        changed = engine.rewrite(args.directory, states, apply=args.action == "apply")
    report = {
        "tag": tag,
        "action": args.action,
        "changed": changed,
        "patches": {s.patch.name: s.state for s in states},
    }
    if args.json:
        print(json.dumps(report))
        return 0
    for s in states:
        print(f"{tag}/{s.patch.name}: {s.patch.path} was {s.state}")
    if changed:
        print(f"{args.action}: {len(changed)} files changed", file=sys.stderr)
    return 0
