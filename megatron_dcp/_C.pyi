"""The compiled ops. Loading the module registers them under `torch.ops.megatron_dcp`."""

def cpu_path(dtype: str, /) -> str:
    """The CPU path for 'float64', 'float32', 'bfloat16' or 'float16' inputs on this machine."""

def limit_cpu_path(name: str, /) -> None:
    """Allow no path above scalar, avx2, avx512, avx512_bf16, amx_bf16; best lifts the limit."""
