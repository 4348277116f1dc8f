from dataclasses import dataclass, field

@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    contention: Contention = Contention()
    noise: Noise = Noise()
    parameters: int | None = None
    gradient_bytes: int = 4
    overlap_reduction: bool = False
    keep_spans: bool = False
