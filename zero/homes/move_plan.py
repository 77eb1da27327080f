"""What a change of placement makes every segment do. Pure: who leaves memory, what is given back, what comes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lamina.tiers import Block, Home, Placement, Plane, Tier
from lamina.zero.groups.segment import Segment

from .move_rules import home_of


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What comes into memory, in blocks of these sizes: the parameters of a segment, or as much of its state as ``state`` says.
    ``source``: parameters are copied from there, and it is given back then; None: all is read from NVMe."""

    segment: Segment
    tier: Tier
    sizes: Sequence[int]
    state: Home | None = None
    source: Block | None = None
    source_tier: Tier = Tier.NVME


class MovePlan:
    """The way from the present homes to those of ``target``; good for as long as they are the present ones.

    ``leaving``: segments whose state leaves memory, though it may come back to another place. ``let_go``: those whose parameters
    go elsewhere and are on NVMe, too, by the time that they do. ``anew``: everything that may leaves and comes back, so that
    memory is cut as at the start.
    """

    def __init__(self, segments: Sequence[Segment], target: Placement, *, anew: bool = False) -> None:
        self.target = target
        self._segments = segments
        self.leaving = [s for s in segments if s.state and (anew or not _state_stays(home_of(s), self.home(s)))]
        self.let_go = [
            s
            for s in segments
            if s.trainable
            and (s in self.leaving or s.state_tier is Tier.NVME)
            and (self.home(s).param is not s.param_tier or (anew and _moves_alone(s)))
        ]

    def home(self, segment: Segment) -> Home:
        """Where a segment is to live."""
        return self.target.homes[segment.name]

    def given_back(self) -> Iterator[tuple[Tier, Block]]:
        """Blocks that are free before anything comes."""
        for segment in self.leaving:
            for block in segment.state.values():
                yield home_of(segment).front_tier, block
        for segment in self.let_go:
            if segment.home is not None:
                yield segment.param_tier, segment.home

    def arrivals(self) -> Iterator[Arrival]:
        """Parameters first: each state lies beside those in memory."""
        for segment in self._segments:
            tier, goes = self.home(segment).param, segment in self.let_go
            if tier is Tier.NVME or not (goes or tier is not segment.param_tier):
                continue
            yield Arrival(
                segment=segment,
                tier=tier,
                sizes=[home_nbytes(segment)],
                source=None if goes else segment.home,
                source_tier=segment.param_tier,
            )
        for segment in self._segments:
            home = self.home(segment)
            tier = home.front_tier
            if segment.trainable and tier is not Tier.NVME and (not segment.state or segment in self.leaving):
                numel = home.kept or segment.layout.shard_numel
                sizes = [numel * spec.itemsize for spec in segment.planes if spec.plane is not Plane.PARAM]
                yield Arrival(segment=segment, tier=tier, sizes=sizes, state=home)


def home_nbytes(segment: Segment) -> int:
    """Bytes of the block that parameters are at home in."""
    return segment.nbytes if segment.replicated else segment.shard_nbytes


def _state_stays(home: Home, then: Home) -> bool:
    """Whether memory goes on to have what it has of a state. The front of a divided one has its parameters nowhere else."""
    return home == then if home.kept else home.state is then.state


def _moves_alone(segment: Segment) -> bool:
    """Whether parameters can be read again without the other ranks."""
    return not segment.persistent and not (segment.replicated and segment.layout.world_size > 1)
