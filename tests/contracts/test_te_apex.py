"""Transformer Engine and apex: what is called of them, against the sources of the packages.

Neither can be imported without CUDA. Transformer Engine's wheel on the index holds its Python
sources: it is unpacked and its signatures are read, nothing of it is run (nightly). NVIDIA's apex
is not on the index (the package of that name there is another project): give a checkout as
APEX_DIR. What runs on a GPU is in tests/gpu/test_gpu_te.py.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.contracts.megatron_env import ROOT


def parameters(file: Path, name: str) -> list[str]:
    """Parameter names of a function or `Class.method` in a source file."""
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    *parents, last = name.split(".")
    for parent in parents:
        found = [x for x in ast.walk(ast.Module(body, [])) if isinstance(x, ast.ClassDef)]
        body = next(x for x in found if x.name == parent).body
    functions = [x for x in body if isinstance(x, ast.FunctionDef) and x.name == last]
    assert functions, f"{file} has no {name}"
    a = functions[-1].args
    return [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked Python sources of the pinned transformer-engine."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pin = next(x.split(":")[1].strip() for x in lines if x.startswith("#   sources:"))
    folder = tmp_path_factory.mktemp("te")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    subprocess.run([*command, str(folder), pin], check=True, timeout=200)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder, [n for n in wheel.namelist() if n.endswith(".py")])
    return folder / "transformer_engine" / "pytorch"


@pytest.mark.nightly
def test_transformer_engines_attention_takes_what_megatron_gives_it(engine: Path) -> None:
    """Fields of PackedSeqParams by name, and the switch of the CP group by position."""
    file = engine / "attention" / "dot_product_attention" / "dot_product_attention.py"
    given = parameters(file, "DotProductAttention.forward")
    for name in ("query_layer", "key_layer", "value_layer", "attention_mask", "qkv_format",
                 "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv",
                 "attn_mask_type", "window_size"):  # fmt: skip
        assert name in given
    group = parameters(file, "DotProductAttention.set_context_parallel_group")
    assert group[1:5] == ["cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"]
    rope = parameters(engine / "attention" / "rope.py", "apply_rotary_pos_emb")
    assert rope[:3] == ["t", "freqs", "tensor_format"]
    assert {"fused", "cu_seqlens", "cp_size", "cp_rank", "interleaved"} <= set(rope)


@pytest.mark.nightly
def test_transformer_engines_optimizer_and_norms_are_where_megatron_looks(engine: Path) -> None:
    adam = parameters(engine / "optimizers" / "fused_adam.py", "FusedAdam.__init__")
    assert {"params", "lr", "betas", "eps", "weight_decay", "adam_w_mode"} <= set(adam)
    for name in ("LayerNorm", "RMSNorm", "Linear", "LayerNormLinear"):
        text = (engine / "__init__.py").read_text()
        assert f"import {name}" in text or f" {name}," in text


def test_megatron_reads_the_placements_params_before_its_cp_group() -> None:
    """0.16: TEDotProductAttention takes packed params and switches CP off for `local_cp_size` 1."""
    import megatron.core

    folder = Path(megatron.core.__path__[0])
    file = folder / "extensions" / "transformer_engine.py"
    given = parameters(file, "TEDotProductAttention.forward")
    assert given[:6] == ["self", "query", "key", "value", "attention_mask", "attn_mask_type"]
    assert "packed_seq_params" in given
    assert "packed_seq_params.local_cp_size == 1" in file.read_text()
    assert "local_cp_size" in (folder / "packed_seq_params.py").read_text()


@pytest.mark.skipif("APEX_DIR" not in os.environ, reason="APEX_DIR names no checkout of apex")
def test_apex_has_what_megatron_imports() -> None:
    root = Path(os.environ["APEX_DIR"]) / "apex"
    adam = parameters(root / "optimizers" / "fused_adam.py", "FusedAdam.__init__")
    assert {"params", "lr", "betas", "eps", "weight_decay", "adam_w_mode"} <= set(adam)
    apply = root / "multi_tensor_apply" / "multi_tensor_apply.py"
    called = parameters(apply, "MultiTensorApply.__call__")
    assert called == ["self", "op", "noop_flag_buffer", "tensor_lists"]
    norm = root / "normalization" / "fused_layer_norm.py"
    assert parameters(norm, "FusedLayerNormAffineFunction.forward")[1:6] == [
        "input", "weight", "bias", "normalized_shape", "eps",
    ]  # fmt: skip
