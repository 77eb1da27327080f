"""Bytes that an assignment of homes takes of each tier: the one arithmetic behind placement, simulation and planner. Pure."""

from collections.abc import Mapping, Sequence
from copy import copy

from lamina.tiers.memory.sizes import GroupSizes, SortedSizes

from .homes import PAGE, Home, SegmentSize, Wishes, page_up
from .segment_needs import SegmentNeeds, is_fetched, segment_needs

OWN_STATE = "own state of torch's optimizer"
SAVED_INPUTS = "saved inputs"
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
        self._known: dict[tuple[str, Home], SegmentNeeds] = {}
        self._device_params = self._host_params = self._device_state = self._host_state = 0
        self._stored = self._frozen = 0
        self._streaming = 0  # segments whose update passes through buffers
        self._kept_gradient_bytes = 0
        self._kept_gradients = SortedSizes()
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
        self._own_state = sum(s.own_state_bytes for s in segments)
        self._own_gradients = sum(s.own_gradient_bytes for s in segments)
        for segment in segments:
            self.homes[segment.name] = homes[segment.name]
            self._count(segment, _NOTHING, self._of(segment, homes[segment.name]))

    def copy(self) -> "Needs":
        """Another one, to be moved on its own."""
        other = copy(self)
        other.homes = dict(self.homes)
        for name in ("_kept_gradients", "_passing_blocks", "_read", "_fetched", "_at_once_bytes"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def move(self, segment: SegmentSize, home: Home) -> Home:
        """Give one segment another home; returns the one that it had."""
        before = self.homes[segment.name]
        self.homes[segment.name] = home
        self._count(segment, self._of(segment, before), self._of(segment, home))
        return before

    def _of(self, s: SegmentSize, home: Home) -> SegmentNeeds:
        key = (s.name, home)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = segment_needs(s, home, self.wishes)
        return found

    def _count(self, s: SegmentSize, old: SegmentNeeds, new: SegmentNeeds) -> None:
        """Put one part in the place of another in every sum."""
        self._device_params += new.device_params - old.device_params
        self._host_params += new.host_params - old.host_params
        self._device_state += new.device_state - old.device_state
        self._host_state += new.host_state - old.host_state
        self._stored += new.stored - old.stored
        self._frozen += new.frozen - old.frozen
        self._streaming += new.streams - old.streams
        self._kept_gradient_bytes += new.kept_gradient - old.kept_gradient
        self._passing_rest += new.other_gradient - old.other_gradient
        if self.spill:
            self._kept_gradients.exchange(old.kept_gradient, new.kept_gradient)
        self._passing_blocks.exchange(old.block_gradient, new.block_gradient)
        self._read.change(s.group, new.read - old.read)
        self._count_fetched(s.group, new.fetched - old.fetched)

    def _count_fetched(self, group: int, nbytes: int) -> None:
        if not nbytes:
            return
        used_with = self._used_with.get(group, ())
        for index in used_with:
            self._at_once_bytes.remove(self._together_bytes(index))
        self._fetched.change(group, nbytes)
        for index in used_with:
            self._at_once_bytes.add(self._together_bytes(index))

    def streamed(self) -> list[SegmentSize]:
        """Segments whose parameters are fetched for use."""
        return [s for s in self.segments if is_fetched(s, self.homes[s.name], self.wishes)]

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

    # -- each tier -----------------------------------------------------------------------------------------------------

    def device_bytes(self, window_groups: int) -> int:
        """The sum of ``device_items``."""
        return self._device_params + self._device_state + self.window_bytes(window_groups) + self._buckets

    def host_bytes(self, staging: int) -> int:
        """The sum of ``host_items``."""
        return (
            self._host_params
            + self._host_state
            + self.gradient_bytes()
            + (staging if self._streaming else 0)
            + self.fetch_buffer_bytes()
            + page_up(self.wishes.saved_input_bytes)
            + self._own_state
            + self._own_gradients
        )

    def device_items(self, window_groups: int) -> dict[str, int]:
        return _present(
            {
                "resident parameters": self._device_params,
                "optimizer state": self._device_state,
                "window of fetched groups": self.window_bytes(window_groups),
                "gradient buckets": self.bucket_bytes(),
            }
        )

    def host_items(self, staging: int) -> dict[str, int]:
        return _present(
            {
                "resident parameters": self._host_params,
                "optimizer state": self._host_state,
                "gradients": self.gradient_bytes(),
                "update buffers": staging if self.updates_stream() else 0,
                "fetch buffers": self.fetch_buffer_bytes(),
                SAVED_INPUTS: page_up(self.wishes.saved_input_bytes),
                OWN_STATE: self._own_state,
                OWN_GRADIENTS: self._own_gradients,
            }
        )

    def nvme_items(self) -> dict[str, int]:
        return _present(
            {
                f"{self.generations} generations": self._stored * self.generations,
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
        return kept + self._passing_rest + self._passing_blocks.maximum * min(2, len(self._passing_blocks))

    def scratch_bytes(self) -> int:
        """The scratch file has a place for every gradient plane."""
        return sum(s.shard_bytes(s.grad_itemsize) for s in self.segments) if self.spill else 0

    def fetch_buffer_bytes(self) -> int:
        """Host memory through which NVMe-resident parameters pass to a GPU: equal buffers for the largest group's shards."""
        return FETCH_BUFFERS * self._read.sorted.maximum if self.wishes.separate_device else 0


_NOTHING = SegmentNeeds()


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
