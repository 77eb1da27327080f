"""What the engine tells this layer, decided from its config."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from lamina.aio_native import AsyncIO
from lamina.tiers import Budgets, NvmePath, Tier, Wishes
from lamina.tiers.memory.gpu import Accelerator

from .groups.grouping import Grouping
from .step.optimizer import AdamDefaults


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """Choices for one module on one rank. Bytes are limits of this rank; None means as much as is needed.

    ``stage``: 0 keeps everything on every rank, 1 and 2 share out the optimizer state, 3 the parameters too.
    """

    stage: int = 3
    accelerator: Accelerator | None = None  # None: compute shares the host's memory
    compute_dtype: torch.dtype | None = None  # None: leave the model's own dtypes
    grad_dtype: torch.dtype | None = None  # None: the compute dtype
    trains: bool = True  # False: forward only, nothing but the parameters is kept
    persistence_threshold: int = 0  # parameters of up to so many elements stay whole in memory,
    persistent_numel: int = 2**63 - 1  # but no more elements than this in all
    grouping: Grouping = field(default_factory=Grouping)
    budgets: Budgets = field(default_factory=Budgets)
    wishes: Wishes = field(default_factory=Wishes)
    nvme: Sequence[NvmePath] = ()
    job: str = "default"
    generations: int = 2
    verify: Literal["always", "resume", "off"] = "resume"
    keep_state: bool = False
    resume: bool | Literal["auto"] | None = None  # with keep_state: see resume.py
    client: torch.optim.Optimizer | None = None  # runs instead of lamina's Adam, on state in memory
    recompute: Tier | None = None  # blocks are computed again in the backward pass, their inputs wait on that tier
    lookahead: int = 64
    micro_batches: int = 1  # that a step accumulates, as far as the placement is to reckon with
    clip_norm: float = 0.0
    adam: AdamDefaults = field(default_factory=AdamDefaults)
    num_threads: int | None = None
    tell: Callable[[str], None] = field(default=lambda _: None)  # gets sentences about a start that takes long
    open_io: Callable[[], AsyncIO] = AsyncIO

    @property
    def inputs_share_host(self) -> bool:
        """Whether saved inputs use what the placement leaves of the host budget, since nothing was set aside for them."""
        wanted = self.recompute in (Tier.HOST, Tier.NVME) and not self.wishes.saved_input_bytes
        return wanted and self.budgets.host_bytes is not None
