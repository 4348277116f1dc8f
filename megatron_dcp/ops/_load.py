"""Loads the compiled ops, or says how to build them."""

from __future__ import annotations

from importlib import import_module

from megatron_dcp.errors import MdcpError


class OpsNotBuiltError(MdcpError, ImportError):
    """`megatron_dcp._C` is missing or cannot be loaded; the message says how to build it."""


def load_extension() -> None:
    """Import torch and `megatron_dcp._C`, which registers the ops of the `megatron_dcp` namespace.

    Raises OpsNotBuiltError when either is missing or the library does not fit the torch at hand.
    """
    try:
        import_module("torch")  # the extension finds its symbols in libtorch, loaded here
    except ImportError as cause:
        raise OpsNotBuiltError(
            "megatron_dcp.ops needs torch, which this interpreter cannot import. Install it "
            "(`pip install 'megatron-dcp[torch]'`) and rebuild with "
            "`pip install --no-build-isolation .`"
        ) from cause
    try:
        import_module("megatron_dcp._C")
    except ImportError as cause:
        raise OpsNotBuiltError(
            f"megatron_dcp._C, the compiled ops, cannot be loaded ({cause}). Build it with the "
            "interpreter that runs torch: `python setup.py build_ext --inplace` in a source tree, "
            "or `pip install --no-build-isolation .`; MDCP_BUILD_OPS=1 makes a missing torch an "
            "error of the build."
        ) from cause
