from dataclasses import dataclass, field

@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    strategy: str = 'dcp'
    cost: str = 'auto'
    memory_gb: float | None = None
    lockstep: str = 'auto'
    recompute: Literal['auto', 'off'] = 'auto'
    oversize: Oversize = 'error'

@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    normalize: Normalize = 'token'
    max_grad_norm: float | None = None
    float32_gradients: bool = True
    ema_decay: float | None = None
    plan_ahead: int = 1
    measure: bool = False
    timeout_s: float | None = None
    watchdog_s: float | None = None
    watchdog_dir: str = '.'

@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    max_tokens_per_rank: int | None = None
    split: Literal['auto', 'windows', 'documents'] = 'auto'
    no_trim: bool = False
    forward_step: str | None = None
    allow_plan_dependent: bool = False
    allow_untested: bool = False
    plan_dir: str | None = None
