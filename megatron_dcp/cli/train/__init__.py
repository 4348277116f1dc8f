"""`mdcp train`: the reference trainer. See `options.py` for what it does and its options."""

from __future__ import annotations

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Entry point of the subcommand."""
    from megatron_dcp.cli.train.run import main as run

    return run(argv)
