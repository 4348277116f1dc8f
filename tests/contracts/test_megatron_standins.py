"""CPU stand-ins: without any one of them real Megatron fails; all can be taken out again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dcp.adapters.megatron.standins import CORE, GAPS, TRAINING
from megatron_dcp.testing.pool import WorkerPool
from tests.contracts.megatron_env import ROOT, own_python
from tests.contracts.test_megatron_core import EXPERTS
from tests.contracts.test_megatron_training import arguments, run

pytestmark = pytest.mark.distributed

# piece -> (a case of plain Megatron that needs it, words of the error without it)
EXPERT_RANKS = {"ep": 2, "model": EXPERTS}
CORE_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "engine_name": (EXPERT_RANKS, "te_general_gemm"),
    "device_mode": ({}, "accelerator device"),
    "current_device": ({}, "CUDA"),
    "rng": ({}, "CUDA"),
    "streams": (EXPERT_RANKS, "CUDA"),
    "type_strings": ({"distributed": True}, "FloatTensor"),
    "synchronize": ({"pp": 2}, "CUDA"),
    "split_sizes": (EXPERT_RANKS, "all_to_all_single"),
}
TRAINING_CASES = {
    "presence": "CUDA",
    "counters": "CUDA",
    "process_group_arguments": "device_ids",
}


def test_every_stand_in_has_a_case() -> None:
    assert [p.name for p in GAPS] == ["wheel_gaps"]
    assert {p.name for p in CORE} == set(CORE_CASES)
    assert {p.name for p in TRAINING} == {*TRAINING_CASES, "fused_kernels"}


@pytest.mark.parametrize("piece", CORE_CASES)
def test_megatron_core_does_not_train_without(megatron_pool: WorkerPool, piece: str) -> None:
    case, words = CORE_CASES[piece]
    target = "tests.contracts.megatron_probes:without"
    for error in megatron_pool.run(2, target, piece=piece, **case):
        assert words in error


@pytest.mark.nightly
@pytest.mark.parametrize("piece", TRAINING_CASES)
def test_megatron_training_does_not_run_without(own_megatron_pool: WorkerPool, piece: str) -> None:
    argv = arguments(train_iters="1")
    for result in run(own_megatron_pool, 2, argv, leave_out=[piece]):
        assert TRAINING_CASES[piece] in result["error"]


def python(executable: str, code: str, *path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [executable, "-c", code], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *path])},
    )  # fmt: skip


IMPORT = """
from megatron_dcp.adapters.megatron import standins
standins.install(training=False, leave_out={leave_out!r})
import megatron.core.models.gpt.gpt_model
"""


def test_the_newer_wheel_cannot_be_imported_with_its_gaps() -> None:
    done = python(own_python(), IMPORT.format(leave_out=("wheel_gaps",)))
    assert done.returncode == 1
    assert "triton" in done.stderr or "override" in done.stderr
    done = python(own_python(), IMPORT.format(leave_out=()))
    assert done.returncode == 0, done.stderr[-2000:]


UNDONE = """
import builtins, torch, torch.distributed as dist
from megatron_dcp.adapters.megatron import standins
import megatron.core.tensor_parallel.random as tp_random
import megatron.core.transformer.moe.moe_utils as moe_utils
places = [torch.cuda, torch.Tensor, torch.nn.Module, torch.autograd, dist, builtins,
          tp_random, moe_utils]
def state():
    return [dict(vars(place)) for place in places]
before = state()
standins.install()
during = [sum(a.get(k) is not v for k, v in b.items()) for a, b in zip(before, state())]
assert str(torch.zeros(1, device="cuda").device) == "cpu" and all(during[:5]), during
standins.remove()
changed = [(p, k) for p, a, b in zip(places, before, state())
           for k in a.keys() | b.keys() if a.get(k) is not b.get(k)]
assert not changed, changed
assert not torch.cuda.is_available()
"""


def test_stand_ins_are_taken_out_without_a_trace() -> None:
    done = python(sys.executable, UNDONE)
    assert done.returncode == 0, done.stderr[-2000:]


BUILD = """
from types import SimpleNamespace
from megatron_dcp.adapters.megatron import standins
standins.install(leave_out={leave_out!r})
from megatron.legacy import fused_kernels
fused_kernels.load(SimpleNamespace(masked_softmax_fusion=False))
"""


@pytest.mark.skipif(
    not (Path(os.environ.get("MEGATRON_LM_DIR", "/")) / "megatron/legacy/fused_kernels").is_dir(),
    reason="MEGATRON_LM_DIR names no tree that builds fused kernels (core_v0.16.1 does)",
)
def test_a_source_tree_builds_no_kernels_with_nvcc() -> None:
    tree = os.environ["MEGATRON_LM_DIR"]
    done = python(sys.executable, BUILD.format(leave_out=("fused_kernels",)), tree)
    assert done.returncode == 1
    assert "nvcc" in done.stderr
    done = python(sys.executable, BUILD.format(leave_out=()), tree)
    assert done.returncode == 0, done.stderr[-2000:]
