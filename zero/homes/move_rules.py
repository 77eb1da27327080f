"""What may change its home while training, and what may not. Pure: sentences about segments and homes."""

from collections.abc import Mapping, Sequence

from lamina.tiers import Home, Placement, Tier
from lamina.zero.groups.segment import Segment
from lamina.zero.options import ZeroOptions


def home_of(segment: Segment) -> Home:
    """Where a segment lives."""
    return Home(
        param=segment.param_tier,
        state=segment.state_tier,
        kept=segment.kept,
        kept_on=segment.kept_on,
        late=segment.late,
    )


def why_all_stays(options: ZeroOptions, placement: Placement) -> str | None:
    """Why no home can change while training, as a clause; None when some can."""
    if not options.trains:
        return "nothing is trained"
    if options.accelerator is not None:
        return "state of a GPU's parameters does not move"
    if options.client is not None:
        return "an optimizer of torch holds on to its state"
    if options.generations == 1:
        return "generations: 1 updates in place, and a move needs the old generation while the next is written"
    if options.wishes.param_shares or options.wishes.state_shares:
        return "the configuration says what share of it lives where"
    if placement.scratch_bytes:
        return "gradients go through a scratch file, for which the homes are settled"
    return None


def why_not(segments: Sequence[Segment], old: Placement, target: Placement, *, keep_state: bool) -> str | None:
    """Why segments cannot go from one placement to another, as a clause; None when they can, as far as rules go."""
    buffers = [(p.sub_group_numel, p.staging_count, p.scratch_bytes) for p in (old, target)]
    if buffers[0] != buffers[1]:
        return "it needs other update buffers"
    moved = [s for s in segments if target.homes[s.name] != home_of(s)]
    if any(not s.trainable or s.persistent for s in moved):
        return "it moves frozen or persistent parameters"
    if any(_parted(home_of(s)) or _parted(target.homes[s.name]) for s in moved):
        return "it moves parameters that are on nvme without their optimizer state"
    if keep_state and any(_comes_into_memory(s, target.homes) for s in moved):
        return "it brings optimizer state into memory, where a later process would not find it (tiers.keep_state)"
    if all(target.homes[s.name].state is not Tier.NVME for s in segments if s.trainable):
        return "it would leave nothing of the state on nvme"
    return None


def _parted(home: Home) -> bool:
    return home.param is Tier.NVME and home.state is not Tier.NVME


def _comes_into_memory(segment: Segment, homes: Mapping[str, Home]) -> bool:
    home = homes[segment.name]
    return segment.state_tier is Tier.NVME and (home.state is not Tier.NVME or home.kept > segment.kept)
