"""Placement without any cunning: every sum is taken anew for every assignment of homes. What place() must agree with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lamina.tiers import Budgets, Claim, Home, Order, SegmentSize, Tier, Wishes
from lamina.tiers.placement.homes import PAGE, page_up
from lamina.tiers.placement.needs import staging_bytes

Homes = dict[str, Home]


def state_bytes(s: SegmentSize, numel: int) -> int:
    return sum(page_up(numel * itemsize) for itemsize in s.state_itemsizes)


def elements(s: SegmentSize, home: Home, tier: Tier) -> int:
    """Of the optimizer state, on a tier."""
    on = {home.state: s.shard_numel - home.kept}
    if home.kept:
        on[home.kept_on] = home.kept
    return on.get(tier, 0) if s.trained else 0


@dataclass(frozen=True, kw_only=True)
class PlainNeeds:
    """Bytes that segments at given homes take, each item added up over all segments."""

    segments: Sequence[SegmentSize]
    homes: Mapping[str, Home]
    wishes: Wishes
    generations: int = 2
    together: Sequence[Sequence[int]] = ()

    def resident(self, tier: Tier) -> int:
        return sum(s.home_bytes for s in self.segments if self.homes[s.name].param is tier)

    def states(self, tier: Tier) -> int:
        total = 0
        for s in self.segments:
            numel, home = elements(s, self.homes[s.name], tier), self.homes[s.name]
            total += state_bytes(s, numel)
            if self.wishes.separate_device and home.param is Tier.DEVICE and tier is Tier.HOST and s.trained:
                total += page_up(numel * s.param_itemsize)
        return total

    def fetched(self) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for s in self.segments:
            if self.homes[s.name].param not in self.wishes.in_place_tiers and not s.persistent:
                sizes[s.group] = sizes.get(s.group, 0) + s.full_bytes
        return sizes

    def window(self, groups: int) -> int:
        sizes = self.fetched()
        row = [sizes[group] for group in sorted(sizes) if sizes[group]]
        least = max(sum(row[at : at + groups]) for at in range(len(row))) if row else 0
        for used in self.together:
            at_once = [sizes[group] for group in set(used) if sizes.get(group)]
            if at_once:
                least = max(least, sum(at_once) + (len(at_once) - 1) * (max(at_once) - PAGE))
        return least

    def gradients(self) -> int:
        own, passing = 0, []
        for s in self.segments:
            nbytes, home = page_up(s.shard_numel * s.grad_itemsize), self.homes[s.name]
            used_up = self.wishes.overlap_update and home.state is Tier.NVME and not home.kept
            if used_up and s.block and not self.wishes.retain_gradients:
                passing += [nbytes] if nbytes else []
            else:
                own += nbytes
        return own + sum(sorted(passing)[-1:]) * min(2, len(passing))

    def buckets(self) -> int:
        sizes = [(s.block, page_up(s.full_numel * s.bucket_itemsize)) for s in self.segments if s.trained]
        return sum(n for block, n in sizes if not block) + sum(sorted(n for block, n in sizes if block)[-3:])

    def fetch_buffers(self) -> int:
        groups: dict[int, int] = {}
        for s in self.segments:
            if self.homes[s.name].param is Tier.NVME:
                groups[s.group] = groups.get(s.group, 0) + page_up(s.shard_numel * s.param_itemsize)
        return 2 * max(groups.values(), default=0) if self.wishes.separate_device else 0

    def device(self, window: int) -> int:
        return self.resident(Tier.DEVICE) + self.states(Tier.DEVICE) + self.window(window) + self.buckets()

    def host(self, staging: int) -> int:
        streams = any(
            s.trained and Tier.NVME in (self.homes[s.name].state, self.homes[s.name].param) for s in self.segments
        )
        total = self.resident(Tier.HOST) + self.states(Tier.HOST) + self.gradients() + self.fetch_buffers()
        return total + staging * streams + page_up(self.wishes.saved_input_bytes)

    def nvme(self) -> int:
        generation = frozen = 0
        for s in self.segments:
            home = self.homes[s.name]
            if not s.trained:
                frozen += page_up(s.shard_numel * s.param_itemsize) * (home.param is Tier.NVME)
            elif home.state is Tier.NVME:
                numel = elements(s, home, Tier.NVME)
                generation += page_up(numel * s.param_itemsize) + state_bytes(s, numel)
            elif home.param is Tier.NVME:
                generation += page_up(s.shard_numel * s.param_itemsize)
        return frozen + self.generations * generation


@dataclass(frozen=True, kw_only=True)
class PlainSearch:
    """The moves of placer.py in an order, each tried on a copy of all homes. Only for budgets that hold everything on the slowest
    tiers or all that is trained in memory."""

    segments: Sequence[SegmentSize]
    budgets: Budgets
    wishes: Wishes
    sub_group: int
    together: Sequence[Sequence[int]] = ()
    order: Order = field(default_factory=Order)

    def needs(self, homes: Homes) -> PlainNeeds:
        return PlainNeeds(segments=self.segments, homes=homes, wishes=self.wishes, together=self.together)

    def fits_device(self, homes: Homes, window: int) -> bool:
        return self.budgets.device_bytes is None or self.needs(homes).device(window) <= self.budgets.device_bytes

    def fits(self, homes: Homes, window: int) -> bool:
        needs, staging = self.needs(homes), staging_bytes(self.segments, self.wishes, self.sub_group)
        host = self.budgets.host_bytes
        return self.fits_device(homes, window) and (host is None or needs.host(staging) <= host)

    def all_at(self, param: Tier, state: Tier) -> Homes:
        return {s.name: Home(param=Tier.DEVICE if s.persistent else param, state=state) for s in self.segments}

    def homes(self) -> Homes:
        params, states = self.wishes.param_tiers, self.wishes.state_tiers
        for param in params:
            everything = self.all_at(param, states[0])
            if self.fits(everything, len(self.needs(everything).fetched())):
                return everything
        homes = self.all_at(params[-1], states[-1])
        if not self.fits(homes, 1):
            return self.in_memory()
        window = min(self.order.window, len(self.needs(homes).fetched()))
        while window > 1 and not self.fits(homes, window):
            window -= 1
        for claim in self.order.first:
            homes = self.raised(homes, claim, window)
        named = [(claim.segment, claim.state) for claim in (*self.order.first, *self.order.last)]
        for param in params:
            moved = {
                s.name: homes[s.name]
                if s.persistent or (index, False) in named
                else replace(homes[s.name], param=param)
                for index, s in enumerate(self.segments)
            }
            if self.fits(moved, len(self.needs(moved).fetched())):
                homes = moved
                break
        undivided = list(states[:-1]) if self.order.divide and self.wishes.divide_state else []
        for claim in [Claim(index, state) for state in (False, True) for index in range(len(self.segments))]:
            if (claim.segment, claim.state) in named:
                continue
            homes = self.raised(homes, claim, window)
            for tier in list(undivided) if claim.state else ():
                before, homes = homes, self.divided(homes, self.segments[claim.segment], tier, window)
                if homes != before:
                    undivided.remove(tier)
        for claim in self.order.last:
            homes = self.raised(homes, claim, window)
        return homes

    def in_memory(self) -> Homes:
        """What is trained: on the device tier what it has room for, all else on host. The rest as memory is left."""
        slow = self.all_at(self.wishes.param_tiers[-1], self.wishes.state_tiers[-1])
        homes = self.all_at(self.wishes.param_tiers[-2], self.wishes.state_tiers[-2])
        homes = {s.name: (homes if s.trained else slow)[s.name] for s in self.segments}
        claims = [Claim(index, state) for state in (False, True) for index in range(len(self.segments))]
        for trained, fits in ((True, self.fits_device), (False, self.fits)):
            for claim in [claim for claim in claims if self.segments[claim.segment].trained is trained]:
                homes = self.raised(homes, claim, 1, fits)
        return homes

    def raised(
        self, homes: Homes, claim: Claim, window: int, fits: Callable[[Homes, int], bool] | None = None
    ) -> Homes:
        s = self.segments[claim.segment]
        what, tiers = ("state", self.wishes.state_tiers) if claim.state else ("param", self.wishes.param_tiers)
        fixed = (not s.trained or homes[s.name].param is Tier.NVME) if claim.state else s.persistent
        skipped = tiers.index(claim.tier) if claim.tier in tiers else 0
        for tier in () if fixed else tiers[skipped:-1]:
            moved = homes | {s.name: replace(homes[s.name], **{what: tier})}
            if moved == homes:
                break
            if (fits or self.fits)(moved, window):
                return moved
        return homes

    def divided(self, homes: Homes, s: SegmentSize, tier: Tier, window: int) -> Homes:
        chunk, home, best = self.wishes.chunk_numel, homes[s.name], homes
        if not s.trained or home.state is not Tier.NVME or home.kept or home.param is Tier.NVME:
            return homes
        for kept in range(chunk, s.shard_numel, chunk):
            moved = homes | {s.name: replace(home, kept=kept, kept_on=tier)}
            if self.fits(moved, window):
                best = moved
        return best
