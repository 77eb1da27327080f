"""The checksums of what an update writes, taken by the kernel while the bytes are in the cache."""

from array import array
from collections.abc import Iterable

from lamina.tiers import Plane, PlaneSpec, TakenSums

from .update import SUM_PIECE, num_sums

_KERNEL_ORDER = (Plane.PARAM, Plane.EXP_AVG, Plane.EXP_AVG_SQ, Plane.REMAINDER, Plane.MASTER)


class UpdateSums:
    """What the store is told of the planes of one sub-group, so that it need not read them again."""

    def __init__(self, planes: Iterable[PlaneSpec]) -> None:
        self._planes = sorted(planes, key=lambda spec: _KERNEL_ORDER.index(spec.plane))
        self.taken: dict[Plane, list[TakenSums]] = {spec.plane: [] for spec in self._planes}

    def room(self, first: int, numel: int) -> int:
        """Where the kernel shall put the checksums of its update of numel elements, which begins at element `first` of
        the sub-group (AdamPlanes.sums)."""
        count = num_sums(numel)
        sums = array("I", bytes(4 * count * len(self._planes)))
        for index, spec in enumerate(self._planes):
            crcs = memoryview(sums)[index * count : (index + 1) * count]
            self.taken[spec.plane].append(
                TakenSums(first * spec.itemsize, numel * spec.itemsize, SUM_PIECE * spec.itemsize, crcs)
            )
        return sums.buffer_info()[0]
