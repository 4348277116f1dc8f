from dataclasses import dataclass, field

@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    workload: Workload
    topology: Topology
    profile: CostProfile
    lockstep: int = 1
    budget_bytes: int = 0
    recompute: bool = True
    step: int = 0
    cost: CostModel

@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    placements: Sequence[Placement]
    algorithm: str
    info: Mapping[str, Any] = field(default_factory=dict)

def register(name: str, *, parameter: str | None = None) -> Callable[[Strategy], Strategy]: ...

def strategy_names() -> list[str]: ...
