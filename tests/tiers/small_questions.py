"""Questions about few segments, drawn at random, and every placement that answers one."""

import random
from collections.abc import Iterator
from itertools import product

from lamina.tiers import (
    BandwidthModel,
    Budgets,
    ComputeTimes,
    DiskSpeed,
    Home,
    PlacementQuestion,
    SegmentSize,
    StepModel,
    Tier,
    Wishes,
)
from lamina.tiers.links.bandwidth import disk_link
from lamina.tiers.placement.placement import Placement

MIB = 1 << 20
GB = 1e9
UNIT = 1 << 16


def segment(index: int, numel: int = MIB, *, trained: bool = True, block: bool = True) -> SegmentSize:
    return SegmentSize(
        name=f"block{index}",
        group=index,
        full_numel=numel,
        shard_numel=numel,
        param_itemsize=2,
        state_itemsizes=(2, 4, 4) if trained else (),
        grad_itemsize=2 if trained else 0,
        block=block,
    )


def draw_question(seed: int, *, most: int) -> PlacementQuestion:
    """1 to ``most`` segments, alike or not, one or two disks, budgets from hardly anything to nearly all, clipping on or off."""
    draw = random.Random(seed)
    number = draw.randint(1, most)
    numels = {
        "alike": [16 * UNIT] * number,
        "unlike": [UNIT * draw.randint(1, 48) for _ in range(number)],
        "one large": [UNIT * draw.randint(16, 96), *[8 * UNIT] * (number - 1)],
    }[draw.choice(["alike", "unlike", "one large"])]
    draw.shuffle(numels)
    trained = [draw.random() > 0.15 for _ in range(number)]
    trained[draw.randrange(number)] = True
    root = draw.random() < 0.3
    segments = tuple(
        segment(index, numel, trained=trained[index], block=index > 0 or not root) for index, numel in enumerate(numels)
    )
    clipping, on_device, total = draw.random() < 0.5, draw.random() < 0.4, sum(numels)
    wishes = Wishes(
        overlap_update=not clipping,
        retain_gradients=clipping,
        chunk_numel=UNIT,
        sub_group_numel=2 * UNIT,
        state_tiers=(Tier.DEVICE, Tier.HOST, Tier.NVME) if on_device else (Tier.HOST, Tier.NVME),
        divide_state=draw.random() < 0.6,
    )
    device = 2 * max(numels) + draw.random() ** 1.5 * total * (12 if on_device else 2)
    host = 3 * 12 * 2 * UNIT + (2 * total if clipping else min(2 * total, 4 * max(numels))) + draw.random() * total * 10
    disks = [
        DiskSpeed(read=draw.choice([0.5, 1, 2.6, 6]) * GB, write=draw.choice([0.5, 1, 2.6, 6]) * GB, direct=True)
        for _ in range(draw.randint(1, 2))
    ]
    rates = [disk.read + disk.write for disk in disks]
    link = disk_link(disks, [rate / sum(rates) for rate in rates], mix_gain=draw.choice([1.0, 1.3, 2.0]))
    tied = number > 1 and draw.random() < 0.2  # the first group's parameters are used at the end, too
    passes_s = link.seconds(12 * total, 12 * total) * draw.choice([0.0, 0.05, 0.3, 1.0, 3.0])
    return PlacementQuestion(
        segments=segments,
        budgets=Budgets(device_bytes=int(device), host_bytes=int(host)),
        wishes=wishes,
        links=BandwidthModel([link]),
        times=ComputeTimes.proportional(
            segments,
            forward_s=passes_s / 3,
            backward_s=passes_s * 2 / 3,
            adam_elements_per_s=draw.choice([5e8, 2e9]),
        ),
        micro_batches=draw.choice([1, 1, 2]),
        order=(*range(number), 0, *reversed(range(1, number)), 0) if tied else (),
    )


def every_placement(asked: PlacementQuestion, *, most_divided: int) -> dict[StepModel, Placement]:
    """All assignments of homes that fit the budgets, with up to so many states divided by quarters; one of those whose steps are
    the same."""
    found: dict[StepModel, Placement] = {}
    for homes in _assignments(asked, {}, most_divided if asked.wishes.divide_state else 0):
        if asked.placer.holds(homes):
            placement = asked.placement_at(homes)
            found.setdefault(asked.step(placement), placement)
    return found


def _assignments(asked: PlacementQuestion, homes: dict[str, Home], divided: int) -> Iterator[dict[str, Home]]:
    """Whatever the segments so far leave possible, by their parameters and states alone."""
    done = [s for s in asked.segments if s.name in homes]
    for tier, budget in ((Tier.DEVICE, asked.budgets.device_bytes), (Tier.HOST, asked.budgets.host_bytes)):
        params = sum(s.home_bytes for s in done if homes[s.name].param is tier)
        states = sum(s.state_bytes(homes[s.name].state_numel(s, tier)) for s in done if s.trained)
        if budget is not None and params + states > budget:
            return
    if len(done) == len(asked.segments):
        yield homes
        return
    s = asked.segments[len(done)]
    for home in _every_home(asked, s):
        if not home.kept or divided:
            yield from _assignments(asked, homes | {s.name: home}, divided - bool(home.kept))


def _every_home(asked: PlacementQuestion, s: SegmentSize) -> list[Home]:
    params, states = asked.wishes.param_tiers, asked.wishes.state_tiers
    if not s.trained:
        return [Home(param=param, state=states[-1]) for param in params]
    whole = [
        Home(param=param, state=state)
        for param, state in product(params, states)
        if param is not Tier.NVME or state is Tier.NVME  # not offered: its parameters would still be read and written
    ]
    quarters = [
        Home(param=param, state=Tier.NVME, kept=quarter * s.shard_numel // 4, kept_on=memory)
        for param, memory, quarter in product(params[:-1], states[:-1], (1, 2, 3))
    ]
    return whole + quarters
