"""What a step cost: times, bytes and bandwidths of links, peaks of tiers, and how far from the bound it was."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What a step's channels had to do; all times in seconds, of one rank.

    ``barrier``: updates wait for the passes. ``shared_cores``: Adam and the model compute on the same cores at the same time.
    """

    compute_s: float  # forward and backward without stalls
    adam_s: float
    forward_backward_io_s: float  # bytes over measured bandwidth
    update_io_s: float
    cores_s: float  # processor time of the whole step, spread evenly over the cores this process may use
    ahead_io_s: float = 0.0  # of the update's reads, those that were issued before it
    late_io_s: float = 0.0  # of its writes, those that ended after it
    barrier: bool = False
    shared_cores: bool = True
    busy_io_s: float = inf  # in which the disks had anything to do

    @property
    def io_s(self) -> float:
        """Of all that was read and written."""
        return self.forward_backward_io_s + self.update_io_s

    def with_io_s(self, seconds: float) -> "StepCosts":
        """The same where the disks need so long for all of it."""
        factor = seconds / self.io_s if self.io_s else 0.0
        names = ("forward_backward_io_s", "update_io_s", "ahead_io_s", "late_io_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    @property
    def lower_bound_s(self) -> float:
        """Least time of a step (DESIGN, one training step).

        With an update barrier: the slowest channel of forward and backward, plus the slowest of the update, less the reads ahead
        and late writes that fit under the passes. Without: the slowest channel over all. On shared cores each of Adam and the
        model makes the other take longer than it need; what is sure is the processor time, but for that of threads which wait
        awake while neither computes, and the passes less all that Adam can have taken. Disks that were faster than their rates
        say have needed no longer than they were busy.
        """
        costs = self.with_io_s(min(self.io_s, self.busy_io_s))
        if costs.barrier:
            hidden = min(costs.ahead_io_s + costs.late_io_s, max(0.0, costs.compute_s - costs.forward_backward_io_s))
            return max(costs.compute_s, costs.forward_backward_io_s) + max(costs.adam_s, costs.update_io_s - hidden)
        if not costs.shared_cores:
            return max(costs.compute_s, costs.adam_s, costs.io_s)
        cores_s = min(costs.cores_s, costs.compute_s + costs.adam_s)
        return max(costs.compute_s - costs.adam_s, cores_s, costs.adam_s, costs.io_s)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The last optimizer step of one rank. Times in seconds, sizes in bytes, bandwidths in GB/s (1e9).

    ``forward_s`` and ``backward_s`` include stalls: the training thread waited for a link, or for "gradient room", the memory
    of gradients whose update is still to be done. ``update_s`` is the time after the backward pass until every
    sub-group was updated and its writes were under way; ``commit_s`` what making the generation current took of ``step()``,
    most of which goes on after it. What is written then is counted with the step that it happens in. ``lower_bound_s`` is that of
    the step's ``costs``, with the disks' rates of the probe or profile at the start.
    """

    step: int
    step_s: float
    forward_s: float
    backward_s: float
    update_s: float
    commit_s: float
    stalled_s: Mapping[str, float] = field(default_factory=dict)  # by what was waited for
    link_bytes: Mapping[str, int] = field(default_factory=dict)
    link_gbps: Mapping[str, float] = field(default_factory=dict)  # bytes over the whole step's time
    communication_share: float = 0.0
    peak_bytes: Mapping[str, int] = field(default_factory=dict)  # by tier
    nvme_written_bytes: int = 0  # since the start: the drive's wear
    lower_bound_s: float = 0.0
    costs: StepCosts | None = None
    grad_norm: float = 0.0
    lr: float = 0.0
    loss_scale: float = 1.0
    skipped: bool = False
    loss: float | None = None  # mean over the window, where a monitor or progress line asked for it

    @property
    def lower_bound_ratio(self) -> float:
        """Step time over its lower bound; 0 when no bound is known."""
        return self.step_s / self.lower_bound_s if self.lower_bound_s else 0.0

    @property
    def stalled_share(self) -> float:
        """Share of the step that the training thread waited in forward and backward."""
        return min(1.0, sum(self.stalled_s.values()) / self.step_s) if self.step_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the two ratios included."""
        return asdict(self) | {
            "lower_bound_ratio": self.lower_bound_ratio,
            "stalled_share": self.stalled_share,
        }
