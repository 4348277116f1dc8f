"""Calls the emulated kernels through the C interface of csrc/ops/cuda/api.h, on numpy arrays.

Arrays are float64 or float32, or uint16 that holds bf16 or fp16 bits. Shape legend: Tq, Tk rows;
H, Hk heads; D head dim. Every output starts as NaN, so that what a kernel forgets to write shows.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
FAULTS = Path(__file__).with_name("faults.cu")  # kernels that are wrong on purpose
DTYPES = {"fp64": 0, "fp32": 1, "bf16": 2, "fp16": 3}
SCHEDULES = ("lockstep", "ascending", "descending", "random", "leader", "laggard")
COPIES = ("late", "early", "random")
FORWARD, BACKWARD_Q, BACKWARD_KV = 0, 1, 2


def load_build_module():
    spec = importlib.util.spec_from_file_location("build_cuda", ROOT / "csrc" / "build_cuda.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_cuda"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """float -> a new array: fp64, fp32, or the bits of bf16 / fp16 (nearest, ties to even)."""
    if dtype == "fp64":
        return np.array(x, np.float64, order="C")
    if dtype == "fp32":
        return np.array(x, np.float32, order="C")
    if dtype == "fp16":
        return np.array(x, np.float16, order="C").view(np.uint16)
    bits = np.array(x, np.float32, order="C").view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded).astype(np.uint16)


def decode(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (x.view(np.float16) if dtype == "fp16" else x).astype(np.float64)


def accumulation(dtype: str) -> str:
    return "fp64" if dtype == "fp64" else "fp32"


def blank(shape, dtype: str) -> np.ndarray:
    return encode(np.full(shape, np.nan), dtype)


class Rows(Structure):
    _fields_ = [("data", c_void_p), ("row_stride", c_int64), ("head_stride", c_int64),
                ("dtype", c_int64)]  # fmt: skip

    @classmethod
    def of(cls, array: np.ndarray, dtype: str) -> Rows:
        size = array.itemsize
        assert array.ndim == 3
        assert array.shape[2] <= 1 or array.size == 0 or array.strides[2] == size
        return cls(array.ctypes.data, array.strides[0] // size, array.strides[1] // size,
                   DTYPES[dtype])  # fmt: skip


class Plan(Structure):
    _fields_ = [(name, c_int64) for name in ("bytes", "segments", "refs", "tiles", "counter",
                                             "tile_count", "tile_rows")]  # fmt: skip


class DropoutArgs(Structure):
    _fields_ = [("probability", c_double), ("key", ctypes.c_uint64), ("head_offset", c_int64),
                ("sample_ids", c_void_p), ("q_positions", c_void_p),
                ("k_positions", c_void_p)]  # fmt: skip


class Options(Structure):
    _fields_ = [("scale", c_double), ("softcap", c_double), ("dropout", DropoutArgs),
                ("total_q", c_int64), ("total_k", c_int64), ("heads", c_int32),
                ("kv_heads", c_int32), ("head_dim", c_int32), ("dtype", c_int32),
                ("scalar", c_int32)]  # fmt: skip


class ForwardArgs(Structure):
    _fields_ = [("options", Options), ("q", Rows), ("k", Rows), ("v", Rows), ("out", Rows),
                ("lse", c_void_p), ("lse_head_stride", c_int64), ("plan", Plan),
                ("plan_blob", c_void_p), ("merge", c_int64)]  # fmt: skip


class BackwardArgs(Structure):
    _fields_ = [("options", Options)] + [
        (name, Rows) for name in ("q", "k", "v", "dout", "dq", "dk", "dv")
    ] + [("lse", c_void_p), ("delta", c_void_p), ("lse_head_stride", c_int64),
         ("delta_head_stride", c_int64), ("q_plan", Plan), ("kv_plan", Plan),
         ("q_plan_blob", c_void_p), ("kv_plan_blob", c_void_p),
         ("accumulate", c_int64)]  # fmt: skip


class DeltaArgs(Structure):
    _fields_ = [("out", Rows), ("dout", Rows), ("dlse", c_void_p), ("delta", c_void_p),
                ("dlse_head_stride", c_int64), ("delta_head_stride", c_int64), ("rows", c_int64),
                ("heads", c_int32), ("head_dim", c_int32)]  # fmt: skip


class ShimError(RuntimeError):
    """A kernel call returned `code`; the machine's reason, if any, is in the text."""

    def __init__(self, code: int, reason: str):
        super().__init__(f"code {code}: {reason}")
        self.code = code


@dataclass
class Problem:
    """Inputs of one attention call, as decoded floats; `segments` [S, 6] as the op takes them."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    segments: np.ndarray
    dtype: str = "bf16"
    scale: float | None = None
    softcap: float = 0.0
    scalar: bool = False
    dropout: tuple | None = None  # (p, key, head_offset, sample_ids, q_positions, k_positions)

    def __post_init__(self):
        if self.scale is None:
            self.scale = self.q.shape[2] ** -0.5
        self.segments = np.ascontiguousarray(self.segments, np.int64).reshape(-1, 6)


class Shim:
    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))
        self.library.mdcp_emulate_last_error.restype = c_char_p
        self.library.mdcp_emulate_sites.restype = c_char_p
        self.configure()

    @classmethod
    def build(cls, sanitizer: str | None = None) -> Shim:
        return cls(load_build_module().build_emulated(sanitizer, [FAULTS]))

    def configure(self, schedule="lockstep", copies="late", seed=0, resident=2, skip="") -> None:
        self.library.mdcp_emulate_configure(
            SCHEDULES.index(schedule), COPIES.index(copies), seed, resident, skip.encode()
        )

    def sites(self) -> list[tuple[str, str]]:
        """(kind, "file:line") of every synchronisation reached so far."""
        lines = self.library.mdcp_emulate_sites().decode().splitlines()
        return [tuple(line.split(" ", 1)) for line in lines]

    def call(self, name: str, args: Structure) -> None:
        code = getattr(self.library, name)(byref(args), c_void_p(None))
        if code != 0:
            raise ShimError(code, self.library.mdcp_emulate_last_error().decode())

    def fault(self, name: str, count: int = 256) -> np.ndarray:
        """Runs a kernel of faults.cu on `count` floats 0, 1, 2, ...; returns what it wrote."""
        source = np.arange(count, dtype=np.float32)
        target = np.full(count, np.nan, np.float32)
        code = getattr(self.library, f"fault_{name}")(
            c_void_p(source.ctypes.data), c_void_p(target.ctypes.data)
        )
        if code != 0:
            raise ShimError(code, self.library.mdcp_emulate_last_error().decode())
        return target

    def plan(self, p: Problem, which: int) -> tuple[Plan, np.ndarray]:
        plan = Plan()
        call = self.library.mdcp_cuda_attention_plan
        call.argtypes = [POINTER(c_int64), c_int64, c_int64, c_int64, ctypes.c_int, ctypes.c_int,
                         ctypes.c_int, ctypes.c_int, POINTER(Plan), c_void_p, c_int64]  # fmt: skip
        fixed = (p.segments.ctypes.data_as(POINTER(c_int64)), len(p.segments), len(p.q), len(p.k),
                 which, DTYPES[p.dtype], p.q.shape[2], int(p.scalar), byref(plan))  # fmt: skip
        blob = np.zeros(0, np.uint8)
        for _ in range(2):  # first for the size
            code = call(*fixed, blob.ctypes.data, blob.size)
            if code != 0:
                raise ShimError(code, "plan")
            blob = blob if blob.size else np.zeros(plan.bytes, np.uint8)
        return plan, blob

    def options(self, p: Problem) -> Options:
        dropout = DropoutArgs()
        if p.dropout is not None:
            probability, key, offset, *ids = p.dropout
            dropout = DropoutArgs(probability, key, offset, *(x.ctypes.data for x in ids))
        return Options(p.scale, p.softcap, dropout, len(p.q), len(p.k), p.q.shape[1], p.k.shape[1],
                       p.q.shape[2], DTYPES[p.dtype], int(p.scalar))  # fmt: skip

    def forward(self, p: Problem, out_dtype=None, running=None):
        """(out, lse) as floats; `running` = earlier (out, lse), joined (merge)."""
        q, k, v = (encode(x, p.dtype) for x in (p.q, p.k, p.v))
        return self.forward_encoded(p, q, k, v, out_dtype, running)

    def forward_encoded(self, p: Problem, q, k, v, out_dtype=None, running=None):
        """As `forward`, on stored arrays that may be strided views."""
        wide = accumulation(p.dtype)
        out_dtype = wide if running is not None else out_dtype or p.dtype
        out = blank(p.q.shape, out_dtype) if running is None else encode(running[0], wide)
        heads_rows = (p.q.shape[1], len(p.q))
        lse = blank(heads_rows, wide) if running is None else encode(running[1], wide)
        plan, blob = self.plan(p, FORWARD)
        self.call("mdcp_cuda_attention_forward", ForwardArgs(
            self.options(p), Rows.of(q, p.dtype), Rows.of(k, p.dtype), Rows.of(v, p.dtype),
            Rows.of(out, out_dtype), lse.ctypes.data, len(p.q), plan, blob.ctypes.data,
            int(running is not None)))  # fmt: skip
        return decode(out, out_dtype), decode(lse, wide)

    def delta(self, out, dout, dlse, dtype: str, out_dtype: str) -> np.ndarray:
        wide = accumulation(dtype)
        out, dout = encode(out, out_dtype), encode(dout, dtype)
        dlse = None if dlse is None else encode(dlse, wide)
        rows, heads, dim = out.shape
        delta = blank((heads, rows), wide)
        dlse_at = None if dlse is None else dlse.ctypes.data
        self.call("mdcp_cuda_attention_delta", DeltaArgs(
            Rows.of(out, out_dtype), Rows.of(dout, dtype), dlse_at,
            delta.ctypes.data, rows, rows, rows, heads, dim))  # fmt: skip
        return decode(delta, wide)

    def backward(self, p: Problem, dout, out, lse, dlse=None, running=None, grad_dtype=None):
        """(dq, dk, dv) as floats; `running` = three earlier ones, added to."""
        wide = accumulation(p.dtype)
        grad_dtype = wide if running is not None else grad_dtype or wide
        delta = encode(self.delta(out, dout, dlse, p.dtype, wide), wide)
        lse = encode(lse, wide)
        q, k, v, dout = (encode(x, p.dtype) for x in (p.q, p.k, p.v, dout))
        shapes = (p.q.shape, p.k.shape, p.k.shape)
        grads = [blank(s, grad_dtype) for s in shapes]
        if running is not None:
            grads = [encode(x, wide) for x in running]
        q_plan, q_blob = self.plan(p, BACKWARD_Q)
        kv_plan, kv_blob = self.plan(p, BACKWARD_KV)
        rows = len(p.q)
        self.call("mdcp_cuda_attention_backward", BackwardArgs(
            self.options(p), *(Rows.of(x, p.dtype) for x in (q, k, v, dout)),
            *(Rows.of(x, grad_dtype) for x in grads), lse.ctypes.data, delta.ctypes.data, rows,
            rows, q_plan, kv_plan, q_blob.ctypes.data, kv_blob.ctypes.data,
            int(running is not None)))  # fmt: skip
        return tuple(decode(x, grad_dtype) for x in grads)
