"""Placements of a plan that come to the same, as stages on a single rank do: one row for all of them."""

from collections.abc import Iterator, Sequence

from lamina.engine.planner import Option
from lamina.engine.planner.placement import TIERS


def rows_of(options: Sequence[Option]) -> Iterator[tuple[str, Option]]:
    """(label, first of those that are alike), in the order given: same homes, bytes and seconds at other stages."""
    alike: dict[tuple[object, ...], list[Option]] = {}
    for item in options:
        place = item.case.place
        peaks = tuple(f"{item.held.peak(tier):.3g}" for tier in TIERS)
        key = (place.param, place.optimizer, place.grad, item.obstacles, peaks, f"{item.time.step_s:.3g}")
        alike.setdefault(key, []).append(item)
    for same in alike.values():
        yield _label(same), same[0]


def _label(same: Sequence[Option]) -> str:
    stages = sorted(item.case.place.stage for item in same)
    named = ", ".join(str(stage) for stage in stages if stage)
    head = " or ".join(["no ZeRO"] * (0 in stages) + [f"ZeRO-{named}"] * bool(named))
    first = same[0].label
    own = f"ZeRO-{same[0].case.place.stage}" if same[0].case.place.stage else "no ZeRO"
    return head + first.removeprefix(own)
