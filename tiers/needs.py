"""Bytes that an assignment of homes takes of each tier: the one arithmetic behind placement, simulation and planner. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from .homes import PAGE, Home, SegmentSize, Wishes, page_up
from .sizes import GroupSizes, SortedSizes
from .tier import Tier

OWN_STATE = "own state of torch's optimizer"
OWN_GRADIENTS = "fp32 gradients for torch's optimizer"
SPILL_WINDOW = 2  # gradient planes in memory at least, where the others go to a scratch file
FETCH_BUFFERS = 2  # one being read into while the other is copied from


class Needs:
    """What segments at given homes need on one rank. All sizes in bytes.

    ``together``: groups that are used at the same time. ``spill``: gradients that host memory cannot hold go to a scratch
    file. Sums are kept up to date by ``move``, so that trying thousands of homes one after the other is cheap.
    """

    def __init__(
        self,
        *,
        segments: Sequence[SegmentSize],
        homes: Mapping[str, Home],
        wishes: Wishes,
        generations: int = 2,
        together: Sequence[Sequence[int]] = (),
        spill: bool = False,
    ) -> None:
        self.segments = segments
        self.homes: dict[str, Home] = {}
        self.wishes = wishes
        self.generations = generations
        self.spill = spill
        self._resident: Counter[Tier] = Counter()
        self._states: Counter[Tier] = Counter()
        self._generation = 0
        self._frozen = 0
        self._streaming = 0  # segments whose update passes through buffers
        self._kept_gradients = SortedSizes()
        self._kept_gradient_bytes = 0
        self._passing_blocks = SortedSizes()  # gradients that are used up as they come
        self._passing_rest = 0
        self._read = GroupSizes()  # parameters on NVMe
        self._fetched = GroupSizes()
        self._at_once = [
            used for used in map(frozenset, together) if len(used) > 1
        ]  # one group alone: see window_bytes
        self._used_with: dict[int, list[int]] = {}
        for index, used in enumerate(self._at_once):
            for group in used:
                self._used_with.setdefault(group, []).append(index)
        self._at_once_bytes = SortedSizes()
        self._buckets = _bucket_bytes(segments)
        for segment in segments:
            self._put(segment, homes[segment.name])

    def move(self, segment: SegmentSize, home: Home) -> Home:
        """Give one segment another home; returns the one that it had."""
        before = self.homes[segment.name]
        self._count(segment, before, -1)
        self._put(segment, home)
        return before

    def _put(self, segment: SegmentSize, home: Home) -> None:
        self.homes[segment.name] = home
        self._count(segment, home, 1)

    def _count(self, s: SegmentSize, home: Home, sign: int) -> None:
        """Add a segment's part to every sum, or take it away."""
        if home.param is not Tier.NVME:
            self._resident[home.param] += sign * s.home_bytes
        elif not s.trained:
            self._frozen += sign * s.shard_bytes(s.param_itemsize)
        elif home.state is not Tier.NVME:
            self._generation += sign * s.shard_bytes(s.param_itemsize)
        if s.trained:
            in_memory = home.state if home.state is not Tier.NVME else home.kept_on
            self._states[in_memory] += sign * self._state_bytes(s, home, in_memory)
            self._generation += sign * self._stored_bytes(s, home)
            self._streaming += sign * (Tier.NVME in (home.state, home.param))
        if home.param is Tier.NVME:
            self._read.change(s.group, sign * s.shard_bytes(s.param_itemsize))
        if self._is_fetched(s, home):
            self._count_fetched(s.group, sign * s.full_bytes)
        self._count_gradient(s, home, sign)

    def _count_fetched(self, group: int, nbytes: int) -> None:
        used_with = self._used_with.get(group, ())
        for index in used_with:
            self._at_once_bytes.remove(self._together_bytes(index))
        self._fetched.change(group, nbytes)
        for index in used_with:
            self._at_once_bytes.add(self._together_bytes(index))

    def _count_gradient(self, s: SegmentSize, home: Home, sign: int) -> None:
        nbytes = s.shard_bytes(s.grad_itemsize)
        if self.wishes.retain_gradients or not self.wishes.overlap_update or home.state is not Tier.NVME or home.kept:
            self._kept_gradient_bytes += sign * nbytes
            sizes = self._kept_gradients
        elif s.block:
            sizes = self._passing_blocks
        else:
            self._passing_rest += sign * nbytes
            return
        if sign > 0:
            sizes.add(nbytes)
        else:
            sizes.remove(nbytes)

    def _is_fetched(self, s: SegmentSize, home: Home) -> bool:
        return home.param not in self.wishes.in_place_tiers and not s.persistent

    def streamed(self) -> list[SegmentSize]:
        """Segments whose parameters are fetched for use."""
        return [s for s in self.segments if self._is_fetched(s, self.homes[s.name])]

    # -- the window of fetched groups ----------------------------------------------------------------------------------

    @property
    def num_fetched(self) -> int:
        """Groups that have something to fetch."""
        return len(self._fetched)

    def window_sizes(self) -> list[int]:
        """Bytes of each group's fetched parameters, largest first."""
        return self._fetched.sorted.largest(self.num_fetched)

    def window_bytes(self, window_groups: int) -> int:
        """So many groups in a row as a pass uses them, and at least those that are used at the same time.

        The latter cannot be moved while they are used, and may lie so that no hole between them is large enough; with
        the largest of them once more for every other, less a page, one always is.
        """
        return max(self._fetched.largest_run(window_groups), self._fetched.sorted.maximum, self._at_once_bytes.maximum)

    def _together_bytes(self, index: int) -> int:
        sizes = [size for group in self._at_once[index] if (size := self._fetched[group])]
        return sum(sizes) + (len(sizes) - 1) * (max(sizes) - PAGE) if sizes else 0

    # -- items of each tier --------------------------------------------------------------------------------------------

    def device_items(self, window_groups: int) -> dict[str, int]:
        return _present(
            {
                "resident parameters": self._resident[Tier.DEVICE],
                "optimizer state": self._states[Tier.DEVICE],
                "window of fetched groups": self.window_bytes(window_groups),
                "gradient buckets": self.bucket_bytes(),
            }
        )

    def host_items(self, staging: int) -> dict[str, int]:
        return _present(
            {
                "resident parameters": self._resident[Tier.HOST],
                "optimizer state": self._states[Tier.HOST],
                "gradients": self.gradient_bytes(),
                "update buffers": staging if self.updates_stream() else 0,
                "fetch buffers": self.fetch_buffer_bytes(),
                "saved inputs": page_up(self.wishes.saved_input_bytes),
                OWN_STATE: sum(s.own_state_bytes for s in self.segments),
                OWN_GRADIENTS: sum(s.own_gradient_bytes for s in self.segments),
            }
        )

    def nvme_items(self) -> dict[str, int]:
        return _present(
            {
                f"{self.generations} generations": self._generation * self.generations,
                "frozen parameters": self._frozen,
                "gradient scratch": self.scratch_bytes(),
            }
        )

    def bucket_bytes(self) -> int:
        """Buckets of several ranks' gradients: those outside the blocks, and three blocks (one filling, two under way)."""
        return self._buckets

    def updates_stream(self) -> bool:
        """Whether any update passes through buffers."""
        return self._streaming > 0

    def gradient_bytes(self) -> int:
        """All gradients; or, where they are used up as they come, what is open at one time."""
        kept = sum(self._kept_gradients.largest(SPILL_WINDOW)) if self.spill else self._kept_gradient_bytes
        return kept + self._passing_rest + sum(self._passing_blocks.largest(1)) * min(2, len(self._passing_blocks))

    def scratch_bytes(self) -> int:
        """The scratch file has a place for every gradient plane."""
        return sum(s.shard_bytes(s.grad_itemsize) for s in self.segments) if self.spill else 0

    def fetch_buffer_bytes(self) -> int:
        """Host memory through which NVMe-resident parameters pass to a GPU: equal buffers for the largest group's shards."""
        return FETCH_BUFFERS * self._read.sorted.maximum if self.wishes.separate_device else 0

    def _state_bytes(self, s: SegmentSize, home: Home, tier: Tier) -> int:
        """Bytes of the planes besides ``param`` (which is counted where the parameters live) on a tier of memory."""
        numel = home.state_numel(s, tier)
        nbytes = s.state_bytes(numel) if numel else 0
        if self.wishes.separate_device and (home.param, tier) == (Tier.DEVICE, Tier.HOST):
            nbytes += page_up(numel * s.param_itemsize)  # the copy that is updated
        return nbytes

    @staticmethod
    def _stored_bytes(s: SegmentSize, home: Home) -> int:
        """Bytes in a generation of what has its state on NVMe: ``param`` is there, too, so that a generation is whole."""
        if home.state is not Tier.NVME:
            return 0
        numel = home.state_numel(s, Tier.NVME)
        return page_up(numel * s.param_itemsize) + s.state_bytes(numel)


def _bucket_bytes(segments: Sequence[SegmentSize]) -> int:
    sizes = [(s.block, page_up(s.full_numel * s.bucket_itemsize)) for s in segments if s.trained]
    blocks = sorted(size for is_block, size in sizes if is_block)
    return sum(size for is_block, size in sizes if not is_block) + sum(blocks[-3:])


def staging_bytes(segments: Sequence[SegmentSize], wishes: Wishes, sub_group: int) -> int:
    """All update buffers: each holds every plane of a sub-group of so many elements, page-aligned."""
    one = max(
        (
            sum(page_up(sub_group * itemsize) for itemsize in (s.param_itemsize, *s.state_itemsizes))
            for s in segments
            if s.trained
        ),
        default=0,
    )
    return wishes.staging_count * one


def _present(items: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in items.items() if size}
