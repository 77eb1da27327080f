"""What a placement is asked about: segments' sizes, budgets and wishes; and its answer for one segment, a home."""

from dataclasses import dataclass

from lamina.tiers.tier import Tier

Shares = tuple[tuple[Tier, float], ...]
"""Tiers, fastest first, and the part of a plane's elements that each holds; the parts add up to 1. Empty: nothing is said."""
PAGE = 4096
"""Every block of memory and every plane in a file starts on a multiple of so many bytes."""


def page_up(nbytes: int) -> int:
    """Bytes of the whole pages that hold so many."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, kw_only=True)
class SegmentSize:
    """One segment's sizes in elements and bytes per element.

    ``state_itemsizes`` are those of the planes that its optimizer keeps besides ``param`` (none when frozen, and none in fp32
    for an optimizer of torch);
    ``grad_itemsize`` is that of the gradient plane (0 when frozen), ``bucket_itemsize`` that of the bucket in which gradients
    of several ranks are summed (0 on one rank). ``replicated``: the parameters' home holds the whole layout, not a shard.
    ``full_numel`` is the whole flat layout, ``shard_numel`` this rank's part. ``group`` is the index of the group that is
    fetched as a whole. ``own_state_bytes`` is what an optimizer of torch keeps for itself in host memory, whatever the homes, and
    ``own_gradient_bytes`` what it is given of gradients in fp32 while it steps.
    """

    name: str
    group: int
    full_numel: int
    shard_numel: int
    param_itemsize: int
    state_itemsizes: tuple[int, ...]
    grad_itemsize: int
    bucket_itemsize: int = 0
    replicated: bool = True
    persistent: bool = False  # the parameters are at home on the device tier, whatever else is wished
    block: bool = True  # False: outside the blocks; its gradient stays open through the whole backward pass
    own_state_bytes: int = 0
    own_gradient_bytes: int = 0

    @property
    def home_bytes(self) -> int:
        """Bytes of the parameters at home in memory."""
        return page_up((self.full_numel if self.replicated else self.shard_numel) * self.param_itemsize)

    def shard_bytes(self, itemsize: int) -> int:
        """Bytes of one plane of this rank's shard, wherever it lies."""
        return page_up(self.shard_numel * itemsize)

    def state_bytes(self, numel: int) -> int:
        """Bytes of the planes besides ``param`` of so many elements of the shard."""
        return sum(page_up(numel * itemsize) for itemsize in self.state_itemsizes)

    @property
    def full_bytes(self) -> int:
        """Bytes of all parameters put together."""
        return page_up(self.full_numel * self.param_itemsize)

    @property
    def trained(self) -> bool:
        return self.grad_itemsize > 0

    @property
    def update_itemsize(self) -> int:
        """Bytes per element that pass through an update buffer; 0 when frozen."""
        return self.param_itemsize + sum(self.state_itemsizes) if self.trained else 0


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Limits in bytes; None means as much as is needed."""

    device_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the configuration pins. Tiers are listed fastest first; the last one is where nothing needs to fit."""

    param_tiers: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST, Tier.NVME)
    state_tiers: tuple[Tier, ...] = (Tier.HOST, Tier.NVME)
    overlap_update: bool = False  # gradients are used up as they come, where the state is on NVMe
    sub_group_numel: int = 1 << 30  # elements updated at a time, at most
    chunk_numel: int = 1 << 19  # sub-groups are cut at multiples of this many elements
    staging_count: int = 3
    retain_gradients: bool = False
    saved_input_bytes: int = 0  # host memory set aside for inputs of blocks that are computed again
    separate_device: bool = False  # the device tier is a GPU's memory: updates need a copy, fetches host buffers
    in_place_tiers: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST)  # where compute can use parameters as they lie
    param_shares: Shares = ()  # of the tiers above; empty: budgets decide
    state_shares: Shares = ()
    late_updates: bool = False  # the gradients of some groups may be kept, to be used under the next forward pass
    divide_state: bool = True  # budgets may divide the state of a segment between memory and NVMe


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where one segment lives between uses: its parameters, and all that its optimizer keeps.

    ``kept``: of a state on NVMe, the elements at the front of this rank's shard whose state lies in memory all the same, on
    ``kept_on``. Their parameters must be at home in memory, since NVMe has nothing of them. ``late``: the gradient is kept until
    the step, and the update runs under the next forward pass; see [Note: late updates] in zero/step/update.py.
    """

    param: Tier
    state: Tier
    kept: int = 0
    kept_on: Tier = Tier.HOST
    late: bool = False

    def __post_init__(self) -> None:
        if self.late and ((self.param, self.state) != (Tier.NVME, Tier.NVME) or self.kept):
            raise ValueError(f"late updates are of what is on nvme only, not of {self.param} and {self.state}")
        if self.kept and (self.state is not Tier.NVME or Tier.NVME in (self.param, self.kept_on)):
            raise ValueError(
                f"{self.kept:,} elements' state on {self.kept_on}, the others' on {self.state}, parameters on {self.param}: "
                f"a state is divided between memory and nvme only, where its parameters are in memory"
            )

    @property
    def front_tier(self) -> Tier:
        """Where the front of the state lies: all of it, unless it is divided."""
        return self.kept_on if self.kept else self.state

    def state_numel(self, segment: SegmentSize, tier: Tier) -> int:
        """Elements of this rank's shard whose optimizer state lies on a tier."""
        if self.state is tier:
            return segment.shard_numel - self.kept
        return self.kept if self.kept_on is tier else 0
