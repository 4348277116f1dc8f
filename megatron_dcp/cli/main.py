"""Entry point of `mdcp`: finds the subcommand and turns errors into exit codes.

Exit status: 0 done, 1 failed (also where stdout was closed before the end), 2 bad usage, 130
interrupted. Progress and errors go to stderr; stdout carries the
result only. A subcommand module has `main(argv: list[str]) -> int` and is imported lazily, so that
`mdcp plan` never pays for torch.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib import import_module, util

from megatron_dcp import __version__
from megatron_dcp.cli.outputs import NO_ROOM
from megatron_dcp.errors import ConfigError, MdcpError

_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)

# name -> what the help line says; the module is megatron_dcp.cli.<name>
COMMANDS = {
    "plan": "plan one global batch: table, JSON, figure",
    "simulate": "compare strategies over many steps on a cluster that you describe",
    "profile": "fit a cost profile on this device (under torchrun)",
    "train": "the reference trainer on real variable-length data (under torchrun)",
    "bench": "planner | attention | end-to-end: side-by-side tables",
    "report": "one HTML page, figures and a Perfetto trace from a run directory",
    "doctor": "what is installed, what is usable, and why not",
    "launch": "run an unmodified trainer script with DCP switched on",
    "patch": "apply | revert | check the source patches on a Megatron-LM checkout",
}


def available() -> dict[str, str]:
    """Subcommands whose module is part of this installation."""
    found = {}
    for name, text in COMMANDS.items():
        if util.find_spec(f"megatron_dcp.cli.{name}") is not None:
            found[name] = text
    return found


def usage() -> str:
    lines = [f"mdcp {__version__}: Data-Centric Parallel", "", "usage: mdcp COMMAND [options]", ""]
    lines += [f"  {name:<9} {text}" for name, text in available().items()]
    return "\n".join([*lines, "", "mdcp COMMAND --help lists the options of a command"])


def main(argv: list[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    name = f"mdcp {args[0]}" if args else "mdcp"
    if isinstance(sys.stdout, io.TextIOWrapper):  # tables hold signs that LANG=C cannot write
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except MdcpError as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        if (fix := _how_to_get(error)) is None:
            raise
        print(f"{name}: {error}; {fix}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read stdout has left, as `| head` does
        _drop_stdout()
        return 1
    except OSError as error:
        if error.errno not in (*NO_ROOM, *_NO_ACCESS):
            raise
        if error.filename is None:
            print(f"{name}: cannot write the output: {error.strerror}", file=sys.stderr)
            _drop_stdout()
        else:
            what = repr(str(error.filename))
            print(f"{name}: cannot read or write {what}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _run(args: list[str]) -> int:
    if args and args[0] in ("--version", "-V"):
        print(__version__)
        return 0
    if args and args[0] in ("--help", "-h"):
        print(usage())
        return 0
    if not args or args[0] not in available():
        found = f"unknown command {args[0]!r}" if args else "no command given"
        print(f"mdcp: {found}\n\n{usage()}", file=sys.stderr)
        return 2
    return int(import_module(f"megatron_dcp.cli.{args[0]}").main(args[1:]))


def _how_to_get(error: ImportError) -> str | None:
    """What to do where torch or a compiled part of this package is missing; None: another fault."""
    if error.name == "torch":
        return (
            "this command needs torch, plan, simulate and report do not: install torch, then this "
            "package again with --no-build-isolation, which builds its ops"
        )
    if error.name == "megatron_dcp" and "_planner" in str(error):
        return (
            "the planner is not compiled in this folder: `python setup.py build_ext --inplace` "
            "builds it in a checkout; an installed package is found from other folders"
        )
    return None


def _drop_stdout() -> None:
    """What is still buffered has nowhere to go; the last flush must not fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
