"""Hardware presets: what one data rank and its links can do, from public datasheets.

Two kinds of numbers, kept apart. Datasheet numbers (`peak_flops`, `memory_bytes`,
`memory_bytes_per_s`, `node_link_bytes_per_s`, `net_link_bytes_per_s`) are the vendor's, dense and
in one direction; the source is named in `source`. Efficiencies are the share of the datasheet that
software reaches; they are assumptions of this project, named in `docs/cost_model.md` with the
published measurement that each was taken from, and they were fixed before any two strategies were
compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dcp.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Share of a datasheet rate that training software reaches, each in 0..1 but the last two.

    gemm: of peak_flops in large matrix products. attention: of peak_flops in the fused attention
    kernel at head dimension 128, forward + backward, long sequences. memory: of the memory rate in
    elementwise kernels. link: of both link rates in collectives.
    attention_half_tokens: sequence length at which the attention kernel reaches half of its rate.
    launch_us_per_layer: kernel launches and tails of one layer, forward + backward.
    """

    gemm: float
    attention: float
    memory: float
    link: float
    attention_half_tokens: int
    launch_us_per_layer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One rank of a cluster. Rates are per second and per direction, sizes in bytes (1e9 = 1 GB).

    ranks_per_node: ranks on one fast link domain. reserved_bytes: context, communicators and
    fragmentation that training cannot use, besides `usable` (a share of the memory).
    """

    name: str
    source: str
    element_bytes: int
    peak_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    node_link_bytes_per_s: float
    net_link_bytes_per_s: float
    ranks_per_node: int
    node_latency_us: float
    net_latency_us: float
    efficiency: Efficiency
    usable: float = 0.92
    reserved_bytes: int = 3_000_000_000

    @property
    def budget_bytes(self) -> int:
        return int(self.memory_bytes * self.usable) - self.reserved_bytes


_AMPERE = Efficiency(
    gemm=0.75, attention=0.57, memory=0.85, link=0.8, attention_half_tokens=300,
    launch_us_per_layer=60.0,
)  # fmt: skip
_HOPPER = Efficiency(
    gemm=0.65, attention=0.55, memory=0.85, link=0.8, attention_half_tokens=400,
    launch_us_per_layer=60.0,
)  # fmt: skip
_BLACKWELL = Efficiency(
    gemm=0.65, attention=0.50, memory=0.85, link=0.8, attention_half_tokens=500,
    launch_us_per_layer=60.0,
)  # fmt: skip
_CORE = Efficiency(
    gemm=0.75, attention=0.35, memory=0.7, link=0.7, attention_half_tokens=64,
    launch_us_per_layer=400.0,
)  # fmt: skip


def _gpu(
    name: str,
    source: str,
    *,
    tflops: float,
    memory_gb: int,
    memory_tb_s: float,
    nvlink_gb_s: float,
    net_gbit_s: float,
    efficiency: Efficiency,
) -> Hardware:
    """8 GPUs on NVSwitch, one network port per GPU. nvlink_gb_s: one direction."""
    return Hardware(
        name=name,
        source=source,
        element_bytes=2,
        peak_flops=tflops * 1e12,
        memory_bytes=memory_gb * 10**9,
        memory_bytes_per_s=memory_tb_s * 1e12,
        node_link_bytes_per_s=nvlink_gb_s * 1e9,
        net_link_bytes_per_s=net_gbit_s * 1e9 / 8,
        ranks_per_node=8,
        node_latency_us=10.0,
        net_latency_us=25.0,
        efficiency=efficiency,
    )


HARDWARE: dict[str, Hardware] = {
    h.name: h
    for h in (
        _gpu(
            "a100-40g", "NVIDIA A100 and DGX A100 (320 GB) datasheets",
            tflops=312, memory_gb=40, memory_tb_s=1.555, nvlink_gb_s=300, net_gbit_s=200,
            efficiency=_AMPERE,
        ),
        _gpu(
            "a100-80g", "NVIDIA A100 80GB SXM and DGX A100 (640 GB) datasheets",
            tflops=312, memory_gb=80, memory_tb_s=2.039, nvlink_gb_s=300, net_gbit_s=200,
            efficiency=_AMPERE,
        ),
        _gpu(
            "h100", "NVIDIA H100 SXM and DGX H100 datasheets",
            tflops=989, memory_gb=80, memory_tb_s=3.35, nvlink_gb_s=450, net_gbit_s=400,
            efficiency=_HOPPER,
        ),
        _gpu(
            "h200", "NVIDIA H200 SXM and DGX H200 datasheets",
            tflops=989, memory_gb=141, memory_tb_s=4.8, nvlink_gb_s=450, net_gbit_s=400,
            efficiency=_HOPPER,
        ),
        _gpu(
            "b200", "NVIDIA HGX B200 and DGX B200 datasheets",
            tflops=2250, memory_gb=180, memory_tb_s=8.0, nvlink_gb_s=900, net_gbit_s=400,
            efficiency=_BLACKWELL,
        ),
        Hardware(
            name="cpu-2core",
            source="one core per rank: 2.6 GHz, 32 float32 operations a cycle (AMD EPYC 9004 "
            "datasheet: 2 x 256-bit FMA), 12 x DDR5-4800 shared by many cores; loopback TCP",
            element_bytes=4,
            peak_flops=83.2e9,
            memory_bytes=8 * 10**9,
            memory_bytes_per_s=20e9,
            node_link_bytes_per_s=2e9,
            net_link_bytes_per_s=1.25e9,
            ranks_per_node=2,
            node_latency_us=60.0,
            net_latency_us=120.0,
            efficiency=_CORE,
            reserved_bytes=1_000_000_000,
        ),
    )
}  # fmt: skip


def hardware(name: str) -> Hardware:
    """A preset by name; ConfigError names the known ones."""
    if name not in HARDWARE:
        raise ConfigError(f"unknown hardware {name!r}; known are {', '.join(HARDWARE)}")
    return HARDWARE[name]
