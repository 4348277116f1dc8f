from dataclasses import dataclass, field

class Step:
    def finish(self) -> float: ...

class Microbatch:
    def backward(self, loss_sum: Tensor) -> None: ...
