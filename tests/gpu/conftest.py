"""Every test of this folder needs a CUDA device and `megatron_dcp._C` built with its kernels."""

import pytest
import torch


def missing() -> str | None:
    """Why the CUDA kernels cannot be run here, or None."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    from megatron_dcp import ops  # noqa: F401  (registers the ops)

    if not torch._C._dispatch_has_kernel_for_dispatch_key("megatron_dcp::varlen_attention", "CUDA"):
        return (
            "megatron_dcp._C has no CUDA kernels; rebuild it with "
            "MDCP_BUILD_CUDA=1 python setup.py build_ext --inplace"
        )
    return None


@pytest.fixture(autouse=True)
def device():
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(11)
    yield torch.device("cuda")
    torch.cuda.synchronize()  # an asynchronous error belongs to the test that caused it
