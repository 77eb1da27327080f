"""Which tier is home to what: a pure function of sizes, budgets and wishes.

Everything starts on the slowest tier that is allowed and is moved up while budgets allow, in the order of what a byte
of memory saves per step: parameters first (each byte kept saves three reads: forward, backward, update), then whole
optimizer states (a read and a write). Fractions are a matter of whole segments here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .homes import Budgets, Home, SegmentSize, Wishes
from .needs import FETCH_BUFFERS, Needs, staging_bytes
from .tier import Tier


class PlacementError(ValueError):
    """The budgets cannot work; the message shows the sum and the least that would."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The outcome. All sizes in bytes of this rank."""

    homes: Mapping[str, Home]
    device_items: Mapping[str, int]
    host_items: Mapping[str, int]
    nvme_items: Mapping[str, int]
    sub_group_numel: int
    staging_count: int
    fetch_buffer_count: int = 0
    scratch_bytes: int = 0
    reasons: Sequence[str] = field(default_factory=tuple)

    @property
    def device_bytes(self) -> int:
        return sum(self.device_items.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host_items.values())

    @property
    def nvme_bytes(self) -> int:
        return sum(self.nvme_items.values())


@dataclass(frozen=True, kw_only=True)
class _Planner:
    segments: Sequence[SegmentSize]
    budgets: Budgets
    wishes: Wishes
    generations: int
    together: Sequence[Sequence[int]] = ()
    spill: bool = False  # gradients that host memory cannot hold go to a scratch file
    state_first: int = 0

    def needs(self, homes: Mapping[str, Home]) -> Needs:
        """What an assignment needs."""
        return Needs(
            segments=self.segments,
            homes=homes,
            wishes=self.wishes,
            generations=self.generations,
            together=self.together,
            spill=self.spill,
        )

    def staging_bytes(self, sub_group: int) -> int:
        return staging_bytes(self.segments, self.wishes, sub_group)

    def fits(self, homes: Mapping[str, Home], window_groups: int, staging: int) -> bool:
        device, host, needs = self.budgets.device_bytes, self.budgets.host_bytes, self.needs(homes)
        return (device is None or sum(needs.device_items(window_groups).values()) <= device) and (
            host is None or sum(needs.host_items(staging).values()) <= host
        )

    def sub_group(self) -> int:
        """Elements per sub-group: the largest that is useful, asked for, and takes at most a third of the host budget."""
        chunk = self.wishes.chunk_numel
        largest = max((s.shard_numel for s in self.segments if s.trained), default=0)
        wanted = min(self.wishes.sub_group_numel, 8 * chunk)
        if self.budgets.host_bytes is not None:
            per_element = max((s.update_itemsize for s in self.segments), default=1) or 1
            wanted = min(wanted, self.budgets.host_bytes // 3 // (self.wishes.staging_count * per_element))
        return min(max(wanted // chunk, 1) * chunk, _multiple(largest, 32)) or 32

    def search(self) -> Placement:
        sub_group = self.sub_group()
        staging = self.staging_bytes(sub_group)
        slow = Home(param=self.wishes.param_tiers[-1], state=self.wishes.state_tiers[-1])
        homes = self.all_at(slow)
        while not self.fits(homes, 1, staging) and sub_group > self.wishes.chunk_numel:
            sub_group -= self.wishes.chunk_numel
            staging = self.staging_bytes(sub_group)
        if not self.fits(homes, 1, staging):
            if Tier.NVME in (slow.param, slow.state) and not self.spill:
                return replace(self, spill=True).search()
            raise PlacementError(self.refusal(homes, staging))
        if self.spill:  # host memory that is left holds gradients: a byte of them is written and read, too
            why = "gradients beyond host memory go to a scratch file on nvme: raise tiers.host_bytes to keep them"
            return self.placement(homes, sub_group, staging, [why])
        # Everything up at once needs neither window nor update buffers, so it is tried before going one by one.
        fast = Home(param=self.wishes.param_tiers[0], state=self.wishes.state_tiers[0])
        for param in self.wishes.param_tiers:
            everything = self.all_at(replace(fast, param=param))
            if self.fits(everything, len(self.needs(everything).window_sizes()), staging):
                return self.placement(everything, sub_group, staging, ["everything fits on the fastest tiers allowed"])
        window = min(3, len(self.needs(homes).window_sizes()))
        while window > 1 and not self.fits(homes, window, staging):
            window -= 1
        for s in [s for s in self.segments if s.trained][: self.state_first]:
            homes = self._raise_state(self._raise_param(homes, s, window, staging), s, window, staging)
        for param in self.wishes.param_tiers:
            pinned = {s.name for s in self.segments if s.persistent}
            all_params = {name: home if name in pinned else replace(home, param=param) for name, home in homes.items()}
            if self.fits(all_params, len(self.needs(all_params).window_sizes()), staging):
                homes = all_params
                break
        for s in self.segments:
            homes = self._raise_param(homes, s, window, staging)
        for s in self.segments:
            homes = self._raise_state(homes, s, window, staging)
        return self.placement(homes, sub_group, staging, [])

    def all_at(self, home: Home) -> dict[str, Home]:
        """The same home for everything, but for parameters that stay on the device tier."""
        return {s.name: replace(home, param=Tier.DEVICE) if s.persistent else home for s in self.segments}

    def _raise_param(self, homes: dict[str, Home], s: SegmentSize, window: int, staging: int) -> dict[str, Home]:
        if s.persistent:
            return homes
        return self._raise(homes, s, window, staging, self.wishes.param_tiers, lambda h, t: replace(h, param=t))

    def _raise_state(self, homes: dict[str, Home], s: SegmentSize, window: int, staging: int) -> dict[str, Home]:
        if not s.trained or homes[s.name].param is Tier.NVME:
            return homes
        return self._raise(homes, s, window, staging, self.wishes.state_tiers, lambda h, t: replace(h, state=t))

    def _raise(
        self,
        homes: dict[str, Home],
        segment: SegmentSize,
        window: int,
        staging: int,
        tiers: Sequence[Tier],
        move: Callable[[Home, Tier], Home],
    ) -> dict[str, Home]:
        """Move one segment to the fastest of ``tiers`` where the budgets still hold."""
        for tier in tiers[:-1]:
            moved = homes | {segment.name: move(homes[segment.name], tier)}
            if moved == homes:
                break
            if self.fits(moved, window, staging):
                return moved
        return homes

    def placement(self, homes: dict[str, Home], sub_group: int, staging: int, reasons: list[str]) -> Placement:
        needs = self.needs(homes)
        window = len(needs.window_sizes())
        while window > 1 and not self.fits(homes, window, staging):
            window -= 1
        return Placement(
            homes=homes,
            device_items=needs.device_items(window),
            host_items=needs.host_items(staging),
            nvme_items=needs.nvme_items(),
            sub_group_numel=sub_group,
            scratch_bytes=needs.scratch_bytes(),
            staging_count=self.wishes.staging_count if needs.updates_stream() else 0,
            fetch_buffer_count=FETCH_BUFFERS if needs.fetch_buffer_bytes() else 0,
            reasons=tuple(reasons),
        )

    def refusal(self, homes: Mapping[str, Home], staging: int) -> str:
        """The sum that does not fit, and the least that would."""
        needs = self.needs(homes)
        least = self.staging_bytes(min(self.wishes.chunk_numel, _multiple(self._largest_shard(), 32)))
        lines = []
        for tier, items, least_items, budget in (
            (
                Tier.DEVICE,
                needs.device_items(1),
                needs.device_items(1),
                self.budgets.device_bytes,
            ),
            (
                Tier.HOST,
                needs.host_items(staging),
                needs.host_items(least),
                self.budgets.host_bytes,
            ),
        ):
            total = sum(items.values())
            if budget is not None and total > budget:
                parts = " + ".join(f"{name} {size:,}" for name, size in items.items())
                lines.append(
                    f"tiers.{tier}_bytes is {budget:,}, but at least {sum(least_items.values()):,} are needed even with "
                    f"everything on {self.wishes.param_tiers[-1]}/{self.wishes.state_tiers[-1]}: {parts} = {total:,}. "
                    f"Write {sum(least_items.values()):,} or more"
                )
        return "\n".join(lines)

    def _largest_shard(self) -> int:
        return max((s.shard_numel for s in self.segments if s.trained), default=0)


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def place(
    segments: Sequence[SegmentSize],
    budgets: Budgets,
    wishes: Wishes,
    *,
    generations: int = 2,
    together: Sequence[Sequence[int]] = (),
    state_first: int = 0,
) -> Placement:
    """Choose every segment's home; raises PlacementError, with the sum, when the budgets cannot work.

    ``together``: groups that are used at the same time, a module's with those of the modules around it. ``state_first``: so many
    segments, from the front, get memory for their optimizer state before any other's parameters do.
    """
    return _Planner(
        segments=segments,
        budgets=budgets,
        wishes=wishes,
        generations=generations,
        together=together,
        state_first=state_first,
    ).search()


def placement_at(
    segments: Sequence[SegmentSize],
    homes: Mapping[str, Home],
    budgets: Budgets,
    wishes: Wishes,
    *,
    like: Placement,
    generations: int = 2,
    together: Sequence[Sequence[int]] = (),
) -> Placement:
    """The placement with segments at given homes and the update buffers of ``like``, whether or not the budgets hold it."""
    planner = _Planner(segments=segments, budgets=budgets, wishes=wishes, generations=generations, together=together)
    staging = planner.staging_bytes(like.sub_group_numel)
    return planner.placement(dict(homes), like.sub_group_numel, staging, [])
