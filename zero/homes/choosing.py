"""Which home each segment gets: the placement whose simulated step is shortest, by what is known of the machine."""

from dataclasses import dataclass, replace

from lamina.tiers import BandwidthModel, Choice, ComputeTimes, Placement, PlacementQuestion, choose
from lamina.tiers.links.bandwidth import DISK
from lamina.tiers.links.known_links import KnownLinks, learn_links
from lamina.zero.options import ZeroOptions
from lamina.zero.ranks.collectives import Ranks

ADAM_ELEMENTS_PER_S = 5e8
"""Until it was measured: what a dozen GB/s of memory give."""

SHARING = "sharing what was measured of the machine"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The placement, what is known of the links, and (where a link is used) the choice that it is the outcome of."""

    placement: Placement
    links: KnownLinks
    choice: Choice | None = None


def decide(question: PlacementQuestion, usual: Placement, options: ZeroOptions, ranks: Ranks) -> Decision:
    """Settle a question whose links are not known yet; ``usual`` is what the budgets alone suggest.

    Where that needs neither a disk nor an accelerator nothing is measured: there is nothing to weigh up. Every rank decides
    alike, since all take the mean of what they know.
    """
    separate = options.wishes.separate_device
    if not usual.nvme_bytes and not separate:
        return Decision(placement=usual, links=KnownLinks(model=BandwidthModel([])))
    known = learn_links(
        options.nvme if usual.nvme_bytes else (),
        options.open_io,
        nbytes=usual.nvme_bytes,
        sharers=ranks.world_size,
        separate_device=separate,
    )
    measured = DISK in known.model.names
    if usual.nvme_bytes and ranks.union([not measured])[0]:
        return Decision(placement=usual, links=known)
    if measured:
        mean = [ranks.mean(number, SHARING) for number in known.numbers]
        known = known.shared_as(mean) if ranks.world_size > 1 else known
    rate = known.adam_elements_per_s or ADAM_ELEMENTS_PER_S
    adam = ranks.mean(rate, SHARING)
    times = ComputeTimes.proportional(question.segments, forward_s=0.0, backward_s=0.0, adam_elements_per_s=adam)
    settled = replace(question, links=known.model, times=times, disks=max(len(known.disks), 1))
    # State that is kept for a later process must lie where that one will look for it, whatever it measures.
    choice = Choice.given(settled, usual) if options.keep_state else choose(settled)
    return Decision(placement=choice.placement, links=known, choice=choice)
