"""What one segment takes at one home: its part of every sum behind a placement. Pure."""

from typing import NamedTuple

from lamina.tiers.tier import Tier

from .homes import Home, SegmentSize, Wishes, page_up


class SegmentNeeds(NamedTuple):
    """Bytes, but for ``streams``: whether the update passes through buffers. A segment has one of the three gradients: kept until
    the step, or used up as it comes, in a block or outside of them."""

    device_params: int = 0
    host_params: int = 0
    device_state: int = 0
    host_state: int = 0
    stored: int = 0
    frozen: int = 0
    streams: bool = False
    read: int = 0
    fetched: int = 0
    kept_gradient: int = 0
    block_gradient: int = 0
    other_gradient: int = 0


def segment_needs(s: SegmentSize, home: Home, wishes: Wishes) -> SegmentNeeds:
    """``stored`` is one generation's part: with a state on NVMe ``param`` is there, too, so that a generation is whole."""
    param, on_nvme = s.shard_bytes(s.param_itemsize), home.param is Tier.NVME
    stored, gradient = 0, s.shard_bytes(s.grad_itemsize)
    if s.trained and home.state is Tier.NVME:
        numel = s.shard_numel - home.kept
        stored = page_up(numel * s.param_itemsize) + s.state_bytes(numel)
    elif s.trained and on_nvme:
        stored = param
    kept = wishes.retain_gradients or not wishes.overlap_update or home.state is not Tier.NVME or home.kept > 0
    kept = kept or home.late
    return SegmentNeeds(
        device_params=s.home_bytes if home.param is Tier.DEVICE else 0,
        host_params=s.home_bytes if home.param is Tier.HOST else 0,
        device_state=_state_bytes(s, home, Tier.DEVICE, wishes),
        host_state=_state_bytes(s, home, Tier.HOST, wishes),
        stored=stored,
        frozen=param if on_nvme and not s.trained else 0,
        streams=s.trained and Tier.NVME in (home.state, home.param),
        read=param if on_nvme else 0,
        fetched=s.full_bytes if is_fetched(s, home, wishes) else 0,
        kept_gradient=gradient if kept else 0,
        block_gradient=gradient if s.block and not kept else 0,
        other_gradient=0 if s.block or kept else gradient,
    )


def is_fetched(s: SegmentSize, home: Home, wishes: Wishes) -> bool:
    """Whether the parameters are fetched for use."""
    return home.param not in wishes.in_place_tiers and not s.persistent


def _state_bytes(s: SegmentSize, home: Home, tier: Tier, wishes: Wishes) -> int:
    """Bytes of the planes besides ``param`` (which is counted where the parameters live) on a tier of memory."""
    numel = home.state_numel(s, tier) if s.trained else 0
    if not numel:
        return 0
    copied = wishes.separate_device and (home.param, tier) == (Tier.DEVICE, Tier.HOST)  # the copy that is updated
    return s.state_bytes(numel) + (page_up(numel * s.param_itemsize) if copied else 0)
