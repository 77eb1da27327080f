"""Which tier is home to what: a pure function of sizes, budgets and wishes.

Everything starts on the slowest tier that is allowed and is moved up while budgets allow, in the order of what a byte
of memory saves per step: parameters first (each byte kept saves three reads: forward, backward, update), then whole
optimizer states (a read and a write). Fractions are a matter of whole segments here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .tier import Tier

ALIGN = 4096
SPILL_WINDOW = 2  # gradient planes in memory at least, where the others go to a scratch file
FETCH_BUFFERS = 2  # one being read into while the other is copied from


class PlacementError(ValueError):
    """The budgets cannot work; the message shows the sum and the least that would."""


@dataclass(frozen=True, kw_only=True)
class SegmentSize:
    """One segment's sizes in elements and bytes per element.

    ``state_itemsizes`` are those of the planes that its optimizer keeps besides ``param`` (none when frozen);
    ``grad_itemsize`` is that of the gradient plane (0 when frozen), ``bucket_itemsize`` that of the bucket in which gradients
    of several ranks are summed (0 on one rank). ``replicated``: the parameters' home holds the whole layout, not a shard.
    ``full_numel`` is the whole flat layout, ``shard_numel`` this rank's part. ``group`` is the index of the group that is
    fetched as a whole.
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

    @property
    def home_bytes(self) -> int:
        """Bytes of the parameters at home in memory."""
        return _up((self.full_numel if self.replicated else self.shard_numel) * self.param_itemsize)

    @property
    def trained(self) -> bool:
        return bool(self.state_itemsizes)

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
    separate_device: bool = False  # the device tier is a GPU's memory: updates need a copy, fetches host buffers
    in_place_tiers: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST)  # where compute can use parameters as they lie


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where one segment lives between uses: its parameters, and all that its optimizer keeps."""

    param: Tier
    state: Tier


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


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, kw_only=True)
class _Planner:
    segments: Sequence[SegmentSize]
    budgets: Budgets
    wishes: Wishes
    generations: int
    together: Sequence[Sequence[int]] = ()
    spill: bool = False  # gradients that host memory cannot hold go to a scratch file
    state_first: int = 0

    # -- what an assignment needs --------------------------------------------------------------------------------

    def streamed(self, homes: Mapping[str, Home]) -> list[SegmentSize]:
        """Segments whose parameters are fetched for use."""
        in_place = self.wishes.in_place_tiers
        return [s for s in self.segments if homes[s.name].param not in in_place and not s.persistent]

    def fetched_sizes(self, homes: Mapping[str, Home]) -> dict[int, int]:
        """Bytes of each group's fetched parameters."""
        groups: dict[int, int] = {}
        for s in self.streamed(homes):
            groups[s.group] = groups.get(s.group, 0) + _up(s.full_numel * s.param_itemsize)
        return groups

    def window_sizes(self, homes: Mapping[str, Home]) -> list[int]:
        """Bytes of each group's fetched parameters, largest first."""
        return sorted(self.fetched_sizes(homes).values(), reverse=True)

    def window_bytes(self, homes: Mapping[str, Home], window_groups: int) -> int:
        """So many of the largest groups, and at least those that are used at the same time.

        The latter cannot be moved while they are used, and may lie so that no hole between them is large enough; with
        the largest of them once more for every other, less a page, one always is.
        """
        sizes = self.fetched_sizes(homes)
        least = sum(sorted(sizes.values(), reverse=True)[:window_groups])
        for groups in self.together:
            at_once = [sizes[group] for group in set(groups) if sizes.get(group)]
            if at_once:
                least = max(least, sum(at_once) + (len(at_once) - 1) * (max(at_once) - ALIGN))
        return least

    def device_items(self, homes: Mapping[str, Home], window_groups: int) -> dict[str, int]:
        resident = sum(s.home_bytes for s in self.segments if homes[s.name].param is Tier.DEVICE)
        states = sum(self._state_bytes(s, homes[s.name]) for s in self.segments if homes[s.name].state is Tier.DEVICE)
        window = self.window_bytes(homes, window_groups)
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
        sizes = [(s.block, _up(s.full_numel * s.bucket_itemsize)) for s in self.segments if s.trained]
        blocks = sorted(size for is_block, size in sizes if is_block)
        return sum(size for is_block, size in sizes if not is_block) + sum(blocks[-3:])

    def host_items(self, homes: Mapping[str, Home], staging: int) -> dict[str, int]:
        resident = sum(s.home_bytes for s in self.segments if homes[s.name].param is Tier.HOST)
        states = sum(self._state_bytes(s, homes[s.name]) for s in self.segments if homes[s.name].state is Tier.HOST)
        return _present(
            {
                "resident parameters": resident,
                "optimizer state": states,
                "gradients": self.gradient_bytes(homes),
                "update buffers": staging if self.updates_stream(homes) else 0,
                "fetch buffers": self.fetch_buffer_bytes(homes),
            }
        )

    def nvme_items(self, homes: Mapping[str, Home]) -> dict[str, int]:
        generations = frozen = 0
        for s in self.segments:
            home = homes[s.name]
            if not s.trained:
                frozen += _up(s.shard_numel * s.param_itemsize) if home.param is Tier.NVME else 0
            elif home.state is Tier.NVME:
                generations += _up(s.shard_numel * s.param_itemsize) + self._state_bytes(s, home)
            elif home.param is Tier.NVME:
                generations += _up(s.shard_numel * s.param_itemsize)
        return _present(
            {
                f"{self.generations} generations": generations * self.generations,
                "frozen parameters": frozen,
                "gradient scratch": self.scratch_bytes(),
            }
        )

    def updates_stream(self, homes: Mapping[str, Home]) -> bool:
        return any(s.trained and Tier.NVME in (homes[s.name].state, homes[s.name].param) for s in self.segments)

    def gradient_bytes(self, homes: Mapping[str, Home]) -> int:
        """All gradients; or, where they are used up as they come, what is open at one time."""
        kept, open_rest = 0, 0
        open_blocks: list[int] = []
        all_kept: list[int] = []
        for s in self.segments:
            nbytes = _up(s.shard_numel * s.grad_itemsize)
            transient = self.wishes.overlap_update and homes[s.name].state is Tier.NVME
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
        return sum(_up(s.shard_numel * s.grad_itemsize) for s in self.segments) if self.spill else 0

    def _state_bytes(self, s: SegmentSize, home: Home) -> int:
        """Bytes of the planes besides ``param`` (which is counted where the parameters live)."""
        nbytes = sum(_up(s.shard_numel * itemsize) for itemsize in s.state_itemsizes)
        if s.trained and self.wishes.separate_device and (home.param, home.state) == (Tier.DEVICE, Tier.HOST):
            nbytes += _up(s.shard_numel * s.param_itemsize)  # the copy that is updated
        return nbytes

    def fetch_buffer_bytes(self, homes: Mapping[str, Home]) -> int:
        """Host memory through which NVMe-resident parameters pass to a GPU: equal buffers for the largest group's shards."""
        if not self.wishes.separate_device:
            return 0
        groups: dict[int, int] = {}
        for s in self.segments:
            if homes[s.name].param is Tier.NVME:
                groups[s.group] = groups.get(s.group, 0) + _up(s.shard_numel * s.param_itemsize)
        return FETCH_BUFFERS * max(groups.values(), default=0)

    def staging_bytes(self, sub_group: int) -> int:
        """All update buffers: each holds every plane of a sub-group, page-aligned."""
        one = max(
            (
                sum(_up(sub_group * itemsize) for itemsize in (s.param_itemsize, *s.state_itemsizes))
                for s in self.segments
                if s.trained
            ),
            default=0,
        )
        return self.wishes.staging_count * one

    # -- search ----------------------------------------------------------------------------------------------------

    def fits(self, homes: Mapping[str, Home], window_groups: int, staging: int) -> bool:
        device, host = self.budgets.device_bytes, self.budgets.host_bytes
        return (device is None or sum(self.device_items(homes, window_groups).values()) <= device) and (
            host is None or sum(self.host_items(homes, staging).values()) <= host
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
            if self.fits(everything, len(self.window_sizes(everything)), staging):
                return self.placement(everything, sub_group, staging, ["everything fits on the fastest tiers allowed"])
        window = min(3, len(self.window_sizes(homes)))
        while window > 1 and not self.fits(homes, window, staging):
            window -= 1
        for s in [s for s in self.segments if s.trained][: self.state_first]:
            homes = self._raise_state(self._raise_param(homes, s, window, staging), s, window, staging)
        for param in self.wishes.param_tiers:
            pinned = {s.name for s in self.segments if s.persistent}
            all_params = {name: home if name in pinned else replace(home, param=param) for name, home in homes.items()}
            if self.fits(all_params, len(self.window_sizes(all_params)), staging):
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
        window = len(self.window_sizes(homes))
        while window > 1 and not self.fits(homes, window, staging):
            window -= 1
        return Placement(
            homes=homes,
            device_items=self.device_items(homes, window),
            host_items=self.host_items(homes, staging),
            nvme_items=self.nvme_items(homes),
            sub_group_numel=sub_group,
            scratch_bytes=self.scratch_bytes(),
            staging_count=self.wishes.staging_count if self.updates_stream(homes) else 0,
            fetch_buffer_count=FETCH_BUFFERS if self.fetch_buffer_bytes(homes) else 0,
            reasons=tuple(reasons),
        )

    def refusal(self, homes: Mapping[str, Home], staging: int) -> str:
        """The sum that does not fit, and the least that would."""
        least = self.staging_bytes(min(self.wishes.chunk_numel, _multiple(self._largest_shard(), 32)))
        lines = []
        for tier, items, least_items, budget in (
            (
                Tier.DEVICE,
                self.device_items(homes, 1),
                self.device_items(homes, 1),
                self.budgets.device_bytes,
            ),
            (
                Tier.HOST,
                self.host_items(homes, staging),
                self.host_items(homes, least),
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


def _present(items: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in items.items() if size}


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
