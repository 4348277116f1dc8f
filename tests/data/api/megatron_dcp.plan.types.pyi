from dataclasses import dataclass, field

@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    data_ranks: int
    ranks_per_node: int
    pipeline_stages: int = 1
    virtual_stages: int = 1
    speed: tuple[int, ...] | None = None
    nodes: int
    def microbatches(self, slots: int) -> int: ...
    def legal_degree(self, degree: int) -> bool: ...
    def degrees(self) -> list[int]: ...
    def block_fits(self, first_rank: int, degree: int) -> bool: ...
    def block_speed(self, first_rank: int, degree: int) -> int: ...

@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, int, int], ...] | None = None
    tokens: int
    def rounded(self, quantum: int) -> Workload: ...

@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    slot: int
    first_rank: int
    degree: int
    samples: tuple[int, ...]
    scheme: str = 'local'
    inner_degree: int = 1
    recompute: int = 0
    recompute_kind: str = 'layers'
    fused: bool = False
    time_us: int = 0
    bytes: int = 0
    ranks: range
    order: tuple[int, int, int]

@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    strategy: str
    algorithm: str
    topology: Topology
    lockstep: int
    cost: CostRef
    budget_bytes: int
    layers: int
    workload: Workload
    placements: tuple[Placement, ...]
    makespan_us: int
    lower_bound_us: int
    step: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...]
    gap: float
    slots: int
    microbatches: int
    def of_rank(self, rank: int) -> list[Placement]: ...
    def tokens_of(self, placement: Placement) -> int: ...
