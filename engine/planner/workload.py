"""What is asked of the model in one optimizer step."""

from dataclasses import dataclass
from enum import StrEnum

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.state_bytes import DType, Optimizer, as_dtype, grad_bytes_per_param, itemsize


class Attention(StrEnum):
    """Whether attention keeps its score matrix."""

    FLASH = "flash"
    PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One rank's part of one optimizer step."""

    micro_batch: int = 1
    """Sequences per rank in one forward pass."""
    sequence: int = 1024
    """Tokens per sequence."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    dtype: DType = DType.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    checkpoint_interval: int = 1
    """Blocks between two kept activations; 0 keeps all activations."""
    attention: Attention = Attention.FLASH
    logits_fp32: bool = True
    """The loss raises half-precision logits to fp32, as most training scripts do."""
    barrier: bool = True
    """The update waits for all gradients (clipping or a loss scaler); without it, it runs under the
    backward pass."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "sequence", "accumulation"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.checkpoint_interval < 0:
            raise PlanError(f"checkpoint_interval: {self.checkpoint_interval} must be 0 (off) or more")
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        for name, kind in (("optimizer", Optimizer), ("attention", Attention)):
            value = getattr(self, name)
            if value not in list(kind):
                raise PlanError(f"{name}: {value!r} is unknown; write one of {', '.join(kind)}")
            object.__setattr__(self, name, kind(value))

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of one rank."""
        return self.micro_batch * self.sequence

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the compute dtype."""
        return itemsize(self.dtype)

    @property
    def grad_bytes(self) -> int:
        """Bytes of a held gradient element."""
        return grad_bytes_per_param(self.dtype, self.accumulation)
