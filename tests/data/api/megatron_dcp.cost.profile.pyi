from dataclasses import dataclass, field

@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    name: str
    model: ModelShape
    pairs: str = 'causal'
    linear_us_per_token: float = 0.0
    attn_us_per_pair: float = 0.0
    attn_spatial_us_per_pair: float = 0.0
    attn_temporal_us_per_pair: float = 0.0
    linear_half_tokens: float = 0
    attn_half_tokens: float = 0
    recompute_fraction: RecomputeFraction = field(default_factory=RecomputeFraction)
    overhead_us: Overhead = field(default_factory=Overhead)
    links: tuple[Link, ...] = ()
    overlap: Overlap = field(default_factory=Overlap)
    comm_bytes_per_token_layer: float | None = None
    static_bytes: float = 0
    kept_bytes_per_token_layer: float = 0
    checkpoint_bytes_per_token_layer: float = 0
    working_bytes_per_token: float = 0
    head_bytes_per_token: float = 0
    budget_bytes: int = 0
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    head_limits: HeadLimits
    ref: CostRef
    def link(self, degree: int) -> Link: ...
    def with_budget(self, budget_bytes: int) -> CostProfile: ...

def load(path: str | Path) -> CostProfile: ...
