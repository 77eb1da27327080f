"""Which tier is home to what: a pure function of sizes, budgets and wishes.

Everything starts on the slowest tier that is allowed and is moved up while budgets allow, in the order of what a byte
of memory saves per step: parameters first (each byte kept saves three reads: forward, backward, update), then optimizer
states (a read and a write), the front of the model first: its gradients are final last, so that the least time is left to
hide its update. Segments move as a whole, but for the first whose state does not fit: it is divided, so that it fills what
memory is left.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .homes import Budgets, Home, SegmentSize, Wishes
from .needs import FETCH_BUFFERS, OWN_GRADIENTS, OWN_STATE, Needs, staging_bytes
from .shares import divided, share_params, share_states
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
    def own_bytes(self) -> int:
        """Of ``host_bytes``, what an optimizer of torch allocates itself: it takes no room in the arena."""
        return self.host_items.get(OWN_STATE, 0) + self.host_items.get(OWN_GRADIENTS, 0)

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
    fixed: Mapping[str, Home] = field(default_factory=dict)

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

    def fits(self, needs: Needs, window_groups: int, staging: int) -> bool:
        device, host = self.budgets.device_bytes, self.budgets.host_bytes
        return (device is None or sum(needs.device_items(window_groups).values()) <= device) and (
            host is None or sum(needs.host_items(staging).values()) <= host
        )

    def sub_group(self) -> int:
        """Elements per sub-group: the largest that is useful, asked for, and takes at most a third of the host budget."""
        chunk = self.wishes.chunk_numel
        wanted = min(self.wishes.sub_group_numel, 8 * chunk)
        if self.budgets.host_bytes is not None:
            per_element = max((s.update_itemsize for s in self.segments), default=1) or 1
            wanted = min(wanted, self.budgets.host_bytes // 3 // (self.wishes.staging_count * per_element))
        return min(max(wanted // chunk, 1) * chunk, _multiple(self._largest_shard(), 32)) or 32

    def search(self) -> Placement:
        sub_group = self.sub_group()
        staging = self.staging_bytes(sub_group)
        needs = self.needs(self.slowest())
        while not self.fits(needs, 1, staging) and sub_group > self.wishes.chunk_numel:
            sub_group -= self.wishes.chunk_numel
            staging = self.staging_bytes(sub_group)
        if (
            not self.spill
        ):  # everything up at once needs neither window nor update buffers: tried before going one by one
            for param in self.wishes.param_tiers:
                everything = self.needs(self.fastest(needs.homes, param))
                if self.fits(everything, everything.num_fetched, staging):
                    return self.placement(everything, sub_group, staging, self._reasons_for_everything())
        if not self.fits(needs, 1, staging):
            if any(Tier.NVME in (home.param, home.state) for home in needs.homes.values()) and not self.spill:
                return replace(self, spill=True).search()
            raise PlacementError(self.refusal(needs, staging))
        if self.spill:  # host memory that is left holds gradients: a byte of them is written and read, too
            why = "gradients beyond host memory go to a scratch file on nvme: raise tiers.host_bytes to keep them"
            return self.placement(needs, sub_group, staging, [why])
        window = min(3, needs.num_fetched)
        while window > 1 and not self.fits(needs, window, staging):
            window -= 1
        for s in [s for s in self.segments if s.trained][: self.state_first]:
            self._raise_param(needs, s, window, staging)
            self._raise_state(needs, s, window, staging)
        for param in self.wishes.param_tiers:
            all_params = self.needs({s.name: self._param_at(s, needs.homes[s.name], param) for s in self.segments})
            if self.fits(all_params, all_params.num_fetched, staging):
                needs = all_params
                break
        for s in self.segments:
            self._raise_param(needs, s, window, staging)
        undivided = list(self.wishes.state_tiers[:-1]) if self.wishes.divide_state else []
        for s in self.segments:
            self._raise_state(needs, s, window, staging)
            for tier in [tier for tier in undivided if self._divide(needs, s, tier, window, staging)]:
                undivided.remove(tier)
        return self.placement(needs, sub_group, staging, [])

    # -- homes to begin with -------------------------------------------------------------------------------------------

    def slowest(self) -> dict[str, Home]:
        """Where everything starts: on the slowest tiers, or where shares or earlier decisions put it."""
        wishes = self.wishes
        slow = Home(param=wishes.param_tiers[-1], state=wishes.state_tiers[-1])
        homes = {s.name: replace(slow, param=Tier.DEVICE) if s.persistent else slow for s in self.segments}
        if wishes.param_shares:
            homes = share_params(self.segments, homes, wishes.param_shares)
        if wishes.state_shares:
            cut = divided(self.segments, wishes.state_shares)
            if cut is not None and not wishes.param_shares and len(wishes.param_tiers) > 1 and not cut.persistent:
                homes[cut.name] = replace(homes[cut.name], param=wishes.param_tiers[-2])
            homes = share_states(self.segments, homes, wishes.state_shares)
        return homes | dict(self.fixed)

    def fastest(self, homes: Mapping[str, Home], param: Tier) -> dict[str, Home]:
        """Everything on the fastest tier of its kind, the parameters on this one."""
        moved = {s.name: self._param_at(s, homes[s.name], param) for s in self.segments}
        if self.wishes.state_shares:
            return moved
        state = self.wishes.state_tiers[0]
        return {name: home if name in self.fixed else replace(home, state=state) for name, home in moved.items()}

    def _param_at(self, s: SegmentSize, home: Home, tier: Tier) -> Home:
        """A segment's home with its parameters on a tier, where they are free to go there."""
        bound = s.persistent or s.name in self.fixed or bool(self.wishes.param_shares)
        return home if bound or (home.kept and tier is Tier.NVME) else replace(home, param=tier)

    # -- one segment at a time -----------------------------------------------------------------------------------------

    def _raise_param(self, needs: Needs, s: SegmentSize, window: int, staging: int) -> None:
        self._raise(
            needs, s, window, staging, self.wishes.param_tiers, lambda home, tier: self._param_at(s, home, tier)
        )

    def _raise_state(self, needs: Needs, s: SegmentSize, window: int, staging: int) -> None:
        if not s.trained or needs.homes[s.name].param is Tier.NVME or self.wishes.state_shares or s.name in self.fixed:
            return
        self._raise(needs, s, window, staging, self.wishes.state_tiers, lambda home, tier: replace(home, state=tier))

    def _raise(
        self,
        needs: Needs,
        s: SegmentSize,
        window: int,
        staging: int,
        tiers: Sequence[Tier],
        move: Callable[[Home, Tier], Home],
    ) -> None:
        """Move one segment to the fastest of ``tiers`` where the budgets still hold."""
        for tier in tiers[:-1]:
            before = needs.homes[s.name]
            moved = move(before, tier)
            if moved == before:
                break
            needs.move(s, moved)
            if self.fits(needs, window, staging):
                break
            needs.move(s, before)

    def _divide(self, needs: Needs, s: SegmentSize, tier: Tier, window: int, staging: int) -> bool:
        """Let a tier keep as much of a segment's state on NVMe as fits there, in chunks; whether that is any."""
        before, chunk = needs.homes[s.name], self.wishes.chunk_numel
        whole = before.state is Tier.NVME and not before.kept
        if not s.trained or not whole or before.param is Tier.NVME or self.wishes.state_shares or s.name in self.fixed:
            return False

        def too_much(chunks: int) -> bool:
            needs.move(s, replace(before, kept=chunks * chunk, kept_on=tier))
            return not self.fits(needs, window, staging)

        chunks = bisect_left(range(1, -(-s.shard_numel // chunk)), True, key=too_much)
        needs.move(s, replace(before, kept=chunks * chunk, kept_on=tier) if chunks else before)
        return chunks > 0

    def placement(self, needs: Needs, sub_group: int, staging: int, reasons: list[str]) -> Placement:
        """The outcome, with as wide a window of fetched groups as the budgets hold."""
        too_wide = bisect_left(range(2, needs.num_fetched + 1), True, key=lambda n: not self.fits(needs, n, staging))
        window = min(too_wide + 1, needs.num_fetched)
        return Placement(
            homes=dict(needs.homes),
            device_items=needs.device_items(window),
            host_items=needs.host_items(staging),
            nvme_items=needs.nvme_items(),
            sub_group_numel=sub_group,
            scratch_bytes=needs.scratch_bytes(),
            staging_count=self.wishes.staging_count if needs.updates_stream() else 0,
            fetch_buffer_count=FETCH_BUFFERS if needs.fetch_buffer_bytes() else 0,
            reasons=tuple(reasons),
        )

    # -- refusal -------------------------------------------------------------------------------------------------------

    def refusal(self, needs: Needs, staging: int) -> str:
        """The sum that does not fit, and the least that would."""
        least = self.staging_bytes(min(self.wishes.chunk_numel, _multiple(self._largest_shard(), 32)))
        device, host = needs.device_items(1), needs.host_items(staging)
        ways = [(sum(device.values()), sum(needs.host_items(least).values()))]
        for param in self.wishes.param_tiers:
            everything = self.needs(self.fastest(needs.homes, param))
            ways.append(
                (
                    sum(everything.device_items(everything.num_fetched).values()),
                    sum(everything.host_items(least).values()),
                )
            )
        budgets = (self.budgets.device_bytes, self.budgets.host_bytes)
        lines = []
        for index, (tier, items) in enumerate(((Tier.DEVICE, device), (Tier.HOST, host))):
            total, budget, other = sum(items.values()), budgets[index], budgets[1 - index]
            if budget is None or total <= budget:
                continue
            enough = min(way[index] for way in ways if way is ways[0] or other is None or way[1 - index] <= other)
            parts = " + ".join(f"{name} {size:,}" for name, size in items.items())
            lines.append(
                f"tiers.{tier}_bytes is {budget:,}, but at least {enough:,} are needed even with "
                f"{self._said_where()}: {parts} = {total:,}. Write {enough:,} or more"
            )
        return "\n".join(lines)

    def _reasons_for_everything(self) -> list[str]:
        shared = self.wishes.param_shares or self.wishes.state_shares
        return [] if shared else ["everything fits on the fastest tiers allowed"]

    def _said_where(self) -> str:
        wishes = self.wishes
        if not wishes.param_shares and not wishes.state_shares:
            return f"everything on {wishes.param_tiers[-1]}/{wishes.state_tiers[-1]}"
        return "nothing in memory beyond the shares of tiers.placement"

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
    fixed: Mapping[str, Home] | None = None,
) -> Placement:
    """Choose every segment's home; raises PlacementError, with the sum, when the budgets cannot work.

    ``together``: groups that are used at the same time, a module's with those of the modules around it. ``state_first``: so many
    segments, from the front, get memory for their optimizer state before any other's parameters do. ``fixed``: homes of segments
    that stay.
    """
    return _Planner(
        segments=segments,
        budgets=budgets,
        wishes=wishes,
        generations=generations,
        together=together,
        state_first=state_first,
        fixed=fixed or {},
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
    return planner.placement(planner.needs(homes), like.sub_group_numel, staging, [])
