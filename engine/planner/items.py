"""One kind of bytes on one tier while some phases last."""

from dataclasses import dataclass
from enum import StrEnum

from lamina.engine.planner.placement import DEVICE


class Phase(StrEnum):
    """Parts of a run whose peaks differ."""

    INIT = "init"
    FORWARD = "forward"
    """Up to the gradient of the logits."""
    BACKWARD = "backward"
    """In the first block of the way back, all other activations still held."""
    BACKWARD_END = "backward end"
    """In the last block of the way back, all gradients complete."""
    UPDATE = "update"
    SAVE = "save"
    LOAD = "load"


class Kind(StrEnum):
    """What bytes are there for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    IN_FLIGHT = "gradients in flight"
    MASTER = "master"
    MOMENTS = "moments"
    ACTIVATIONS = "activations"
    CHECKPOINTS = "activation checkpoints"
    LOGITS = "logits"
    WINDOW = "gathered window"
    BUCKETS = "buckets"
    PINNED = "pinned buffers"
    FRAGMENTS = "allocator fragments"
    COPIES = "collectives' copies"
    STAGING = "checkpoint staging"
    BUILD = "model being built"
    RUNTIME = "process and runtime"


ALWAYS = frozenset(Phase)
TRAINED = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_END})
ON_THE_WAY_BACK = frozenset({Phase.BACKWARD, Phase.BACKWARD_END})
AUTOGRAD = frozenset({Kind.ACTIVATIONS, Kind.CHECKPOINTS, Kind.LOGITS, Kind.IN_FLIGHT})
"""What the framework's allocator hands out during a pass."""
_OUTSIDE = AUTOGRAD | {Kind.COPIES, Kind.FRAGMENTS, Kind.STAGING, Kind.BUILD, Kind.RUNTIME}


@dataclass(frozen=True, kw_only=True)
class Item:
    """Bytes of one kind on one tier of one rank while ``phases`` last."""

    tier: str
    kind: Kind
    nbytes: int
    phases: frozenset[Phase]
    formula: str
    """How the figure comes about, in words."""

    @property
    def arena(self) -> bool:
        """Taken from the tier's byte budget, not by autograd, the driver or the interpreter."""
        return self.kind not in _OUTSIDE or (self.kind is Kind.CHECKPOINTS and self.tier != DEVICE)
