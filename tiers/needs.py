"""Bytes that an assignment of homes takes of each tier: the one arithmetic behind placement, simulation and planner. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .homes import PAGE, Home, SegmentSize, Wishes, page_up
from .tier import Tier

SPILL_WINDOW = 2  # gradient planes in memory at least, where the others go to a scratch file
FETCH_BUFFERS = 2  # one being read into while the other is copied from


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What segments at given homes need on one rank. All sizes in bytes.

    ``together``: groups that are used at the same time. ``spill``: gradients that host memory cannot hold go to a scratch
    file.
    """

    segments: Sequence[SegmentSize]
    homes: Mapping[str, Home]
    wishes: Wishes
    generations: int = 2
    together: Sequence[Sequence[int]] = ()
    spill: bool = False

    def streamed(self) -> list[SegmentSize]:
        """Segments whose parameters are fetched for use."""
        in_place = self.wishes.in_place_tiers
        return [s for s in self.segments if self.homes[s.name].param not in in_place and not s.persistent]

    def fetched_sizes(self) -> dict[int, int]:
        """Bytes of each group's fetched parameters."""
        groups: dict[int, int] = {}
        for s in self.streamed():
            groups[s.group] = groups.get(s.group, 0) + s.full_bytes
        return groups

    def window_sizes(self) -> list[int]:
        """Bytes of each group's fetched parameters, largest first."""
        return sorted(self.fetched_sizes().values(), reverse=True)

    def window_bytes(self, window_groups: int) -> int:
        """So many of the largest groups, and at least those that are used at the same time.

        The latter cannot be moved while they are used, and may lie so that no hole between them is large enough; with
        the largest of them once more for every other, less a page, one always is.
        """
        sizes = self.fetched_sizes()
        least = sum(sorted(sizes.values(), reverse=True)[:window_groups])
        for groups in self.together:
            at_once = [sizes[group] for group in set(groups) if sizes.get(group)]
            if at_once:
                least = max(least, sum(at_once) + (len(at_once) - 1) * (max(at_once) - PAGE))
        return least

    def device_items(self, window_groups: int) -> dict[str, int]:
        resident = sum(s.home_bytes for s in self.segments if self.homes[s.name].param is Tier.DEVICE)
        states = sum(self.state_bytes(s) for s in self.segments if self.homes[s.name].state is Tier.DEVICE)
        window = self.window_bytes(window_groups)
        return _present(
            {
                "resident parameters": resident,
                "optimizer state": states,
                "window of fetched groups": window,
                "gradient buckets": self.bucket_bytes(),
            }
        )

    def bucket_bytes(self) -> int:
        """Buckets of several ranks' gradients: those outside the blocks, and three blocks (one filling, two under way)."""
        sizes = [(s.block, page_up(s.full_numel * s.bucket_itemsize)) for s in self.segments if s.trained]
        blocks = sorted(size for is_block, size in sizes if is_block)
        return sum(size for is_block, size in sizes if not is_block) + sum(blocks[-3:])

    def host_items(self, staging: int) -> dict[str, int]:
        resident = sum(s.home_bytes for s in self.segments if self.homes[s.name].param is Tier.HOST)
        states = sum(self.state_bytes(s) for s in self.segments if self.homes[s.name].state is Tier.HOST)
        return _present(
            {
                "resident parameters": resident,
                "optimizer state": states,
                "gradients": self.gradient_bytes(),
                "update buffers": staging if self.updates_stream() else 0,
                "fetch buffers": self.fetch_buffer_bytes(),
                "saved inputs": page_up(self.wishes.saved_input_bytes),
            }
        )

    def nvme_items(self) -> dict[str, int]:
        generations = frozen = 0
        for s in self.segments:
            home = self.homes[s.name]
            if not s.trained:
                frozen += s.shard_bytes(s.param_itemsize) if home.param is Tier.NVME else 0
            elif home.state is Tier.NVME:
                generations += s.shard_bytes(s.param_itemsize) + self.state_bytes(s)
            elif home.param is Tier.NVME:
                generations += s.shard_bytes(s.param_itemsize)
        return _present(
            {
                f"{self.generations} generations": generations * self.generations,
                "frozen parameters": frozen,
                "gradient scratch": self.scratch_bytes(),
            }
        )

    def updates_stream(self) -> bool:
        """Whether any update passes through buffers."""
        homes = [self.homes[s.name] for s in self.segments if s.trained]
        return any(Tier.NVME in (home.state, home.param) for home in homes)

    def gradient_bytes(self) -> int:
        """All gradients; or, where they are used up as they come, what is open at one time."""
        kept, open_rest = 0, 0
        open_blocks: list[int] = []
        all_kept: list[int] = []
        for s in self.segments:
            nbytes = s.shard_bytes(s.grad_itemsize)
            transient = self.wishes.overlap_update and self.homes[s.name].state is Tier.NVME
            if not transient or self.wishes.retain_gradients:
                kept += nbytes
                all_kept.append(nbytes)
            elif s.block:
                open_blocks.append(nbytes)
            else:
                open_rest += nbytes
        if self.spill:
            kept = sum(sorted(all_kept)[-SPILL_WINDOW:])
        return kept + open_rest + min(2, len(open_blocks)) * max(open_blocks, default=0)

    def scratch_bytes(self) -> int:
        """The scratch file has a place for every gradient plane."""
        return sum(s.shard_bytes(s.grad_itemsize) for s in self.segments) if self.spill else 0

    def state_bytes(self, s: SegmentSize) -> int:
        """Bytes of the planes besides ``param`` (which is counted where the parameters live)."""
        home = self.homes[s.name]
        nbytes = sum(s.shard_bytes(itemsize) for itemsize in s.state_itemsizes)
        if s.trained and self.wishes.separate_device and (home.param, home.state) == (Tier.DEVICE, Tier.HOST):
            nbytes += s.shard_bytes(s.param_itemsize)  # the copy that is updated
        return nbytes

    def fetch_buffer_bytes(self) -> int:
        """Host memory through which NVMe-resident parameters pass to a GPU: equal buffers for the largest group's shards."""
        if not self.wishes.separate_device:
            return 0
        groups: dict[int, int] = {}
        for s in self.segments:
            if self.homes[s.name].param is Tier.NVME:
                groups[s.group] = groups.get(s.group, 0) + s.shard_bytes(s.param_itemsize)
        return FETCH_BUFFERS * max(groups.values(), default=0)


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
