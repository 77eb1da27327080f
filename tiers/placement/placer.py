"""Which tier is home to what: a pure function of sizes, budgets, wishes, and an order in which memory is given out.

Everything starts on the slowest tier that is allowed and is moved up while budgets allow. The usual order is that of what a
byte of memory saves per step: parameters first (each byte kept saves three reads: forward, backward, update), then optimizer
states (a read and a write), the front of the model first: its gradients are final last, so that the least time is left to
hide its update. Segments move as a whole, but for the first whose state does not fit: it is divided, so that it fills what
memory is left.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from lamina.tiers.tier import Tier

from .homes import Budgets, Home, SegmentSize, Wishes
from .needs import FETCH_BUFFERS, Needs, staging_bytes
from .order import USUAL, Claim, Order
from .placement import Placement, PlacementError
from .shares import divided, share_params, share_states

EVERYTHING_FITS = "everything fits on the fastest tiers allowed"
NO_UPDATE_BUFFERS = (
    "all that is trained is kept in memory: update buffers would need more host memory, raise tiers.host_bytes"
)
NO_WINDOW = (
    "all that is trained is kept in memory: fetched parameters would need more device memory, raise tiers.device_bytes"
)


class Placer:
    """Places the same segments in one order or another. What does not depend on the order is reckoned once."""

    def __init__(
        self,
        segments: Sequence[SegmentSize],
        budgets: Budgets,
        wishes: Wishes,
        *,
        generations: int = 2,
        together: Sequence[Sequence[int]] = (),
        fixed: Mapping[str, Home] | None = None,
    ) -> None:
        """``together``: groups that are used at the same time, a module's with those of the modules around it. ``fixed``: homes
        of segments that stay. Raises PlacementError, with the sum, when the budgets cannot work."""
        self.segments = segments
        self.budgets = budgets
        self.wishes = wishes
        self.fixed = fixed or {}
        self._generations = generations
        self._together = together
        self._slow = self._needs(spill=False)
        self.sub_group, self.staging = self._update_buffers(self._slow)
        self.settled = self._settle()
        """The placement, where the order makes no difference to it."""

    def place(self, order: Order = USUAL) -> Placement:
        """One placement."""
        if self.settled is not None:
            return self.settled
        needs = self._slow.copy()
        window = max(min(order.window, needs.num_fetched), 1)
        while window > 1 and not self._fits(needs, window):
            window -= 1
        self._hold(needs, order.late, window)
        for claim in order.first:
            self._serve(needs, claim, window)
        named = order.named
        needs = self._all_params(needs, named) or needs
        undivided = list(self.wishes.state_tiers[:-1]) if order.divide and self.wishes.divide_state else []
        for claim in (claim for claim in self._usual() if claim.what not in named):
            self._serve(needs, claim, window)
            if claim.state:
                self._divide_on(needs, claim, undivided, window)
        for claim in order.last:
            self._serve(needs, claim, window)
        return self._placement(needs, [])

    def place_at(self, homes: Mapping[str, Home], *, divide: Iterable[int] = (), slow_first: bool = False) -> Placement:
        """Segments at given homes, whether or not the budgets hold it. ``divide``: segments whose state memory that is left may
        have a part of, on each tier one; ``slow_first``: on the slowest tier of memory first."""
        needs = self._moved(self._slow.copy(), homes)
        undivided = list(self.wishes.state_tiers[:-1])[:: -1 if slow_first else 1]
        for index in divide:
            self._divide_on(needs, Claim(index, True), undivided, 1)
        return self._placement(needs, [])

    def holds(self, homes: Mapping[str, Home]) -> bool:
        """Whether the budgets hold segments at given homes."""
        return self._fits(self._moved(self._slow.copy(), homes), 1)

    def _placement(self, needs: Needs, reasons: Sequence[str]) -> Placement:
        """The outcome, with as wide a window of fetched groups as the budgets hold."""
        too_wide = bisect_left(range(2, needs.num_fetched + 1), True, key=lambda n: not self._fits(needs, n))
        window = min(too_wide + 1, needs.num_fetched)
        return Placement(
            homes=dict(needs.homes),
            device_items=needs.device_items(window),
            host_items=needs.host_items(self.staging),
            nvme_items=needs.nvme_items(),
            sub_group_numel=self.sub_group,
            scratch_bytes=needs.scratch_bytes(),
            staging_count=self.wishes.staging_count if needs.updates_stream() else 0,
            fetch_buffer_count=FETCH_BUFFERS if needs.fetch_buffer_bytes() else 0,
            reasons=tuple(reasons),
        )

    def _needs(self, *, spill: bool) -> Needs:
        """What everything on the slowest tiers needs."""
        return Needs(
            segments=self.segments,
            homes=self.slowest(),
            wishes=self.wishes,
            generations=self._generations,
            together=self._together,
            spill=spill,
        )

    def _staging_bytes(self, sub_group: int) -> int:
        return staging_bytes(self.segments, self.wishes, sub_group)

    def _fits(self, needs: Needs, window_groups: int, staging: int | None = None) -> bool:
        device, host = self.budgets.device_bytes, self.budgets.host_bytes
        return (device is None or needs.device_bytes(window_groups) <= device) and (
            host is None or needs.host_bytes(self.staging if staging is None else staging) <= host
        )

    def _update_buffers(self, needs: Needs) -> tuple[int, int]:
        """Elements of a sub-group and bytes of all update buffers: the largest that is useful, asked for, takes at most a third
        of the host budget and, as far as chunks can be smaller, fits."""
        chunk = self.wishes.chunk_numel
        wanted = min(self.wishes.sub_group_numel, 8 * chunk)
        if self.budgets.host_bytes is not None:
            per_element = max((s.update_itemsize for s in self.segments), default=1) or 1
            wanted = min(wanted, self.budgets.host_bytes // 3 // (self.wishes.staging_count * per_element))
        sub_group = min(max(wanted // chunk, 1) * chunk, _multiple(self._largest_shard(), 32)) or 32
        while not self._fits(needs, 1, self._staging_bytes(sub_group)) and sub_group > chunk:
            sub_group -= chunk
        return sub_group, self._staging_bytes(sub_group)

    def _settle(self) -> Placement | None:
        """Everything up at once needs neither window nor update buffers: tried before going one by one. Where not even everything
        down fits, gradients go to a scratch file, and host memory that is left holds gradients: a byte of them is written and
        read, too. Where that does not fit, either, update buffers or the window may be what is too large: all that is trained is
        kept in memory."""
        for param in self.wishes.param_tiers:
            everything = self._moved(
                self._slow.copy(), self._all_at(self._slow.homes, param, self.wishes.state_tiers[0])
            )
            if self._fits(everything, everything.num_fetched):
                shared = self.wishes.param_shares or self.wishes.state_shares
                return self._placement(everything, [] if shared else [EVERYTHING_FITS])
        if self._fits(self._slow, 1):
            return None
        needs = self._slow
        if any(Tier.NVME in (home.param, home.state) for home in needs.homes.values()):
            needs = self._needs(spill=True)
            self.sub_group, self.staging = self._update_buffers(needs)
        if not self._fits(needs, 1):
            return self._last_resort(needs)
        why = "gradients beyond host memory go to a scratch file on nvme: raise tiers.host_bytes to keep them"
        return self._placement(needs, [why])

    def _last_resort(self, refused: Needs) -> Placement:
        """All that is trained in memory, so that no update passes through buffers and nothing trained is fetched. Raises
        PlacementError where that does not fit, either."""
        needs = self._in_memory(self.budgets.device_bytes)
        if not self._fits(needs, 1):
            raise self._refusal(refused)
        for claim in self._usual():
            if not self.segments[claim.segment].trained:
                self._serve(needs, claim, 1)
        device = self.budgets.device_bytes
        why = NO_WINDOW if device is not None and refused.device_bytes(1) > device else NO_UPDATE_BUFFERS
        return replace(self._placement(needs, [why]), last_resort=True)

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

    def _all_at(self, homes: Mapping[str, Home], param: Tier, state: Tier) -> dict[str, Home]:
        """Everything that is free to go there on these tiers."""
        moved = {s.name: self._param_at(s, homes[s.name], param) for s in self.segments}
        if self.wishes.state_shares:
            return moved
        return {name: home if name in self.fixed else replace(home, state=state) for name, home in moved.items()}

    def _param_at(self, s: SegmentSize, home: Home, tier: Tier) -> Home:
        """A segment's home with its parameters on a tier, where they are free to go there."""
        bound = s.persistent or s.name in self.fixed or bool(self.wishes.param_shares)
        return home if bound or home.late or (home.kept and tier is Tier.NVME) else replace(home, param=tier)

    def _all_params(self, needs: Needs, but: AbstractSet[tuple[int, bool]]) -> Needs | None:
        """All parameters but for some at once on the fastest tier that holds them; None where no tier does."""
        free = [s for index, s in enumerate(self.segments) if (index, False) not in but]
        for tier in self.wishes.param_tiers:
            homes = needs.homes | {s.name: self._param_at(s, needs.homes[s.name], tier) for s in free}
            moved = self._moved(needs.copy(), homes)
            if self._fits(moved, moved.num_fetched):
                return moved
        return None

    def _in_memory(self, device: int | None) -> Needs:
        """What is trained on host, as far as it is allowed there, but for what so many bytes of the device tier hold, parameters
        first: whether or not host memory holds it."""
        param, state = _slowest_memory(self.wishes.param_tiers), _slowest_memory(self.wishes.state_tiers)
        homes = self._all_at(self._slow.homes, param, state)
        frozen = {s.name: self._slow.homes[s.name] for s in self.segments if not s.trained}
        needs = self._moved(self._slow.copy(), homes | frozen)
        for claim in self._usual():
            if self.segments[claim.segment].trained:
                self._serve(needs, claim, 1, lambda: device is None or needs.device_bytes(1) <= device)
        return needs

    def _moved(self, needs: Needs, homes: Mapping[str, Home]) -> Needs:
        for s in self.segments:
            if needs.homes[s.name] != homes[s.name]:
                needs.move(s, homes[s.name])
        return needs

    def may_be_late(self, s: SegmentSize) -> bool:
        """Whether a segment's update may come late: nothing of it is in memory, and its gradient comes as a whole."""
        home = self._slow.homes[s.name]
        free = s.trained and s.block and s.name not in self.fixed
        return self.wishes.late_updates and free and home.param is home.state is Tier.NVME

    def _hold(self, needs: Needs, late: Iterable[int], window: int) -> None:
        """Keep the gradients of these, as far as they fit."""
        for s in (self.segments[index] for index in late):
            before = needs.move(s, replace(needs.homes[s.name], late=True))
            if not self._fits(needs, window):
                needs.move(s, before)

    # -- one segment at a time -----------------------------------------------------------------------------------------

    def _usual(self) -> Iterator[Claim]:
        for state in (False, True):
            yield from (Claim(index, state) for index in range(len(self.segments)))

    def _serve(self, needs: Needs, claim: Claim, window: int, fits: Callable[[], bool] | None = None) -> None:
        """Move what is claimed to the fastest tier where the budgets still hold; or where ``fits`` says so."""
        s = self.segments[claim.segment]
        fits = fits or (lambda: self._fits(needs, window))
        if not claim.state:
            tiers = _from(self.wishes.param_tiers, claim.tier)
            self._raise(needs, s, tiers, lambda home, tier: self._param_at(s, home, tier), fits)
        elif self._state_is_free(needs, s):
            tiers = _from(self.wishes.state_tiers, claim.tier)
            self._raise(needs, s, tiers, lambda home, tier: replace(home, state=tier), fits)

    def _state_is_free(self, needs: Needs, s: SegmentSize) -> bool:
        """Whether a segment's state may come into memory: its parameters must be there."""
        bound = self.wishes.state_shares or s.name in self.fixed
        return s.trained and needs.homes[s.name].param is not Tier.NVME and not bound

    def _raise(
        self,
        needs: Needs,
        s: SegmentSize,
        tiers: Sequence[Tier],
        move: Callable[[Home, Tier], Home],
        fits: Callable[[], bool],
    ) -> None:
        """Move one segment to the fastest of ``tiers`` where everything still fits."""
        for tier in tiers[:-1]:
            before = needs.homes[s.name]
            moved = move(before, tier)
            if moved == before:
                break
            needs.move(s, moved)
            if fits():
                break
            needs.move(s, before)

    def _divide_on(self, needs: Needs, claim: Claim, undivided: list[Tier], window: int) -> None:
        """Divide what did not fit on one of the tiers, which then divides no other."""
        for tier in [tier for tier in undivided if self._divide(needs, claim, tier, window)]:
            undivided.remove(tier)

    def _divide(self, needs: Needs, claim: Claim, tier: Tier, window: int) -> bool:
        """Let a tier keep as much of a segment's state on NVMe as fits there, in chunks; whether that is any."""
        s = self.segments[claim.segment]
        before, chunk = needs.homes[s.name], self.wishes.chunk_numel
        if before.state is not Tier.NVME or before.kept or not self._state_is_free(needs, s):
            return False

        def too_much(chunks: int) -> bool:
            needs.move(s, replace(before, kept=chunks * chunk, kept_on=tier))
            return not self._fits(needs, window)

        chunks = bisect_left(range(1, -(-s.shard_numel // chunk)), True, key=too_much)
        needs.move(s, replace(before, kept=chunks * chunk, kept_on=tier) if chunks else before)
        return chunks > 0

    # -- refusal -------------------------------------------------------------------------------------------------------

    def _refusal(self, needs: Needs) -> PlacementError:
        """The sum that does not fit, and the least that would."""
        totals = (needs.device_items(1), needs.host_items(self.staging))
        budgets = [self.budgets.device_bytes, self.budgets.host_bytes]
        lines, least = [], {}
        for index, (tier, items) in enumerate(zip((Tier.DEVICE, Tier.HOST), totals, strict=True)):
            total, budget, other = sum(items.values()), budgets[index], budgets[1 - index]
            if budget is None or total <= budget:
                continue
            slow, *ways = self._ways(needs, budgets[0])
            enough = min([slow[index], *(way[index] for way in ways if other is None or way[1 - index] <= other)])
            parts = " + ".join(f"{name} {size:,}" for name, size in items.items())
            lines.append(
                f"tiers.{tier}_bytes is {budget:,}, but at least {enough:,} are needed even with "
                f"{self._said_where()}: {parts} = {total:,}. Write {enough:,} or more"
            )
            budgets[index] = least[tier] = enough
        return PlacementError("\n".join(lines), least=least)

    def _ways(self, slow: Needs, device: int | None) -> Iterator[tuple[int, int]]:
        """Bytes of device and host memory with everything on the slowest tiers, at once on the fastest, and in memory."""
        least = self._staging_bytes(min(self.wishes.chunk_numel, _multiple(self._largest_shard(), 32)))
        yield slow.device_bytes(1), slow.host_bytes(least)
        for param in self.wishes.param_tiers:
            homes = self._all_at(self._slow.homes, param, self.wishes.state_tiers[0])
            everything = self._moved(self._slow.copy(), homes)
            yield everything.device_bytes(everything.num_fetched), everything.host_bytes(least)
        in_memory = self._in_memory(device)
        yield in_memory.device_bytes(1), in_memory.host_bytes(least)

    def _said_where(self) -> str:
        wishes = self.wishes
        if not wishes.param_shares and not wishes.state_shares:
            return f"everything on {wishes.param_tiers[-1]}/{wishes.state_tiers[-1]}"
        return "nothing in memory beyond the shares of tiers.placement"

    def _largest_shard(self) -> int:
        return max((s.shard_numel for s in self.segments if s.trained), default=0)


def _slowest_memory(tiers: Sequence[Tier]) -> Tier:
    """The slowest of these tiers that is memory; the slowest of all where none is."""
    return ([tier for tier in tiers if tier is not Tier.NVME] or tiers)[-1]


def _from(tiers: Sequence[Tier], first: Tier | None) -> Sequence[Tier]:
    """The tiers from one on; all where it is not among them."""
    return tiers[tiers.index(first) :] if first in tiers else tiers


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def place(
    segments: Sequence[SegmentSize],
    budgets: Budgets,
    wishes: Wishes,
    *,
    generations: int = 2,
    together: Sequence[Sequence[int]] = (),
    order: Order = USUAL,
    fixed: Mapping[str, Home] | None = None,
) -> Placement:
    """Choose every segment's home; raises PlacementError, with the sum, when the budgets cannot work. See ``Placer``."""
    placer = Placer(segments, budgets, wishes, generations=generations, together=together, fixed=fixed)
    return placer.place(order)
