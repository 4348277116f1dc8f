"""`python -m megatron_dcp` is `mdcp`."""

from megatron_dcp.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
