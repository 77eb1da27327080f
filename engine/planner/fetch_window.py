"""The window of fetched groups: the bytes that it comes to hold, and no more than these are set aside for it."""

from functools import lru_cache
from itertools import dropwhile

from lamina.engine.planner.case import Case
from lamina.engine.planner.placement import NVME
from lamina.tiers.schedule.window import shortened, window_peak

_peak = lru_cache(maxsize=1024)(window_peak)  # many placements have the same groups to fetch


def window_bytes(case: Case) -> int:
    """Bytes that hold the group in use and those fetched ahead, wherever a pass is, less what is never used of them.

    With ``max_live`` set, as other systems do: so many elements of blocks (the one in use at least) and all outside them.
    """
    part, own, needs = case.slice, case.buffers, case.needs
    if not needs.streamed():
        return 0
    if own.max_live is not None:
        live = part.outside + max(min(own.max_live, sum(part.blocks)), part.largest_block)
        return live * case.load.itemsize
    # Gradient buckets lie in the same memory, which fetched groups use while there are none.
    buckets = needs.bucket_bytes()
    reserved = needs.window_bytes(1 + own.lookahead)
    while (held := max(_held(case, reserved), _held(case, reserved + buckets) - buckets)) < reserved:
        reserved = held
    return max(reserved, needs.window_bytes(1))  # what is used at the same time must have room wherever it lies


def _held(case: Case, capacity: int) -> int:
    """What fetched groups take of a window of so many bytes at most."""
    part, lookahead = case.slice, case.buffers.lookahead
    sizes, trained = [0] * len(part.groups), set()
    for segment in case.needs.streamed():
        sizes[segment.group] += segment.full_bytes
        trained |= {segment.group} if segment.trained else set()
    forward = [part.places[group] for group in part.order]
    blocks = {part.places[group] for group in range(part.num_outside, len(part.groups))}
    # Tables of tokens and positions are not used on the way back.
    order = forward + list(dropwhile(lambda place: place not in blocks, forward))[::-1]
    # A copy that the update writes into is of use in the next step, too, as is one of frozen parameters.
    renewed = case.place.param == NVME and case.machine.shared_memory
    return _peak(
        tuple(sizes),
        tuple(shortened(order, sizes, capacity, lookahead=lookahead)),
        capacity,
        lookahead=lookahead,
        carried=frozenset(range(len(sizes))) - (set() if renewed else trained),
    )
