"""Brings a freshly built model's parameters to their homes, segment by segment, in bounded memory."""

from collections.abc import Callable, Sequence

import torch

from lamina.tiers import Arena, Block, GenerationStore, Plane, Tier, Transaction
from lamina.tiers.memory.heap import Heap
from lamina.zero.adam.dtypes import plane_dtype
from lamina.zero.adam.kernels import Kernels
from lamina.zero.groups.memory import tensor_over
from lamina.zero.groups.partition import round_up
from lamina.zero.groups.segment import Segment
from lamina.zero.ranks.collectives import Ranks

from .away import whole
from .move_rules import home_of
from .start_progress import StartProgress

PAGE = 4096


class InitialState:
    """Writes each segment's planes home and leaves the parameters bound to home memory, or unbound.

    ``arenas`` gives memory for homes by tier; ``staging`` is one block through which NVMe-resident planes pass,
    ``chunk_numel`` elements at a time. ``tell``: gets a sentence now and then when it takes long.
    """

    def __init__(
        self,
        *,
        arenas: dict[Tier, Arena],
        kernels: Kernels,
        store: GenerationStore | None,
        staging: Block | None,
        chunk_numel: int,
        ranks: Ranks,
        tell: Callable[[str], None],
    ) -> None:
        self._arenas = arenas
        self._kernels = kernels
        self._store = store
        self._staging = staging
        self._chunk_numel = chunk_numel
        self._ranks = ranks
        self._tell = tell

    def bring_home(self, segments: Sequence[Segment], *, keep_stored: bool = False) -> None:
        """Place every segment; with a store, as one generation of step 0.

        ``keep_stored``: what the store holds already stays; what memory caches of it has yet to be read from there."""
        transaction = None
        if self._store is not None and not keep_stored:
            # A store that was kept has its frozen shards already, and they are to be written anew.
            anew = self._store.current is not None
            transaction = self._store.begin(replace_frozen=anew)
        heap = Heap()
        progress = StartProgress(sum(map(_given_bytes, segments)), self._tell)
        with torch.no_grad():
            for segment in segments:
                came_with = _given_bytes(segment)
                with whole(segment.parameters, self._ranks):
                    self._place(segment, transaction)
                heap.freed(came_with)
                progress.advance(came_with)
        heap.give_back()
        if transaction is not None:
            transaction.commit(0, {})

    def _place(self, segment: Segment, transaction: Transaction | None) -> None:
        if segment.stored_planes and transaction is not None:
            self._write(segment, transaction)
        if segment.trainable and (segment.state_tier is not Tier.NVME or segment.kept):
            self._keep_state(segment)
        if segment.param_tier is not Tier.NVME:
            self._keep_parameters(segment)
        if not segment.in_place:
            segment.unbind()

    # -- NVMe ----------------------------------------------------------------------------------------------------------

    def _write(self, segment: Segment, transaction: Transaction) -> None:
        if self._staging is None:
            raise RuntimeError(f"{segment.name} is to live on NVMe but there is no store")
        numel, shard_begin = segment.layout.shard_numel, segment.layout.shard_range(segment.rank)[0]
        for begin in range(segment.kept, numel, self._chunk_numel):
            count = min(self._chunk_numel, numel - begin)
            planes = self._fill(segment, shard_begin + begin, count)
            handles = []
            for spec in segment.stored_planes:
                where = begin * spec.itemsize
                handles.append(transaction.write(segment.name, spec.plane, planes[spec.plane], offset=where))
            for handle in handles:
                handle.wait()

    def _fill(self, segment: Segment, begin: int, count: int) -> dict[Plane, memoryview]:
        """Elements [begin, begin + count) of every plane, in the staging block."""
        staging = self._staging
        if staging is None:
            raise RuntimeError("no staging block")
        views: dict[Plane, memoryview] = {}
        tensors: dict[Plane, torch.Tensor] = {}
        offset = 0
        for spec in segment.planes:
            dtype = plane_dtype(spec.plane, segment.dtype)
            tensors[spec.plane] = tensor_over(staging, dtype, count, offset).zero_()
            views[spec.plane] = staging.view[offset : offset + count * spec.itemsize]
            offset += round_up(count * spec.itemsize, PAGE)
        if Plane.REMAINDER in tensors:
            # The master passes through the first moment's place, which is zeroed again afterwards.
            master = tensors[Plane.EXP_AVG]
            _copy_range(segment, begin, master)
            self._split(master, tensors[Plane.PARAM], tensors[Plane.REMAINDER])
            master.zero_()
        else:
            _copy_range(segment, begin, tensors[Plane.PARAM])
            if Plane.MASTER in tensors:
                _copy_range(segment, begin, tensors[Plane.MASTER])
        return views

    def _split(self, master: torch.Tensor, param: torch.Tensor, remainder: torch.Tensor) -> None:
        self._kernels.split_bf16(
            master.numel(), master=master.data_ptr(), param=param.data_ptr(), remainder=remainder.data_ptr()
        )

    # -- memory --------------------------------------------------------------------------------------------------------

    def _keep_state(self, segment: Segment) -> None:
        numel, begin = segment.kept or segment.layout.shard_numel, segment.layout.shard_range(segment.rank)[0]
        arena = self._arenas[home_of(segment).front_tier]
        for spec in segment.planes:
            if spec.plane is Plane.PARAM and not self._needs_host_copy(segment):
                continue
            block = arena.alloc(numel * spec.itemsize, f"{spec.plane} of {segment.name}")
            segment.state[spec.plane] = block
            tensor = tensor_over(block, plane_dtype(spec.plane, segment.dtype), numel).zero_()
            if spec.plane is Plane.MASTER:
                _copy_range(segment, begin, tensor)
            elif spec.plane is Plane.PARAM:
                self._fill_parameters(segment, begin, tensor)
            elif spec.plane is Plane.REMAINDER:
                self._split_piecewise(segment, begin, torch.empty(0, dtype=torch.bfloat16), tensor)

    def _split_piecewise(self, segment: Segment, begin: int, param: torch.Tensor, remainder: torch.Tensor) -> None:
        """Split the masters from element ``begin`` on, a piece at a time so that no fp32 copy of them all is needed. One
        of the two results may be empty: it is not wanted."""
        numel = max(param.numel(), remainder.numel())
        piece = min(numel, self._chunk_numel)
        master = torch.empty(piece, dtype=torch.float32)
        high = torch.empty(piece, dtype=torch.bfloat16)
        low = torch.empty(piece, dtype=torch.int16)
        for start in range(0, numel, piece or 1):
            part = slice(start, min(start + piece, numel))
            count = part.stop - start
            _copy_range(segment, begin + start, master[:count].zero_())
            self._split(master[:count], high[:count], low[:count])
            if param.numel():
                param[part].copy_(high[:count])
            if remainder.numel():
                remainder[part].copy_(low[:count])

    def _keep_parameters(self, segment: Segment) -> None:
        arena = self._arenas[segment.param_tier]
        numel = segment.layout.numel if segment.replicated else segment.layout.shard_numel
        begin = 0 if segment.replicated else segment.layout.shard_range(segment.rank)[0]
        block = arena.alloc(numel * segment.dtype.itemsize, f"parameters of {segment.name}")
        device = segment.device if segment.param_tier is Tier.DEVICE else None
        flat = tensor_over(block, segment.dtype, numel, device=device).zero_()
        self._fill_parameters(segment, begin, flat)
        if device is None:
            segment.home = block
        else:
            segment.device_home = block
        if segment.in_place:
            segment.bind(block, 0)

    @staticmethod
    def _needs_host_copy(segment: Segment) -> bool:
        """Parameters at home on an accelerator are updated in a copy in host memory."""
        return segment.device is not None and segment.param_tier is Tier.DEVICE

    def _fill_parameters(self, segment: Segment, begin: int, flat: torch.Tensor) -> None:
        """Parameters in compute dtype from element ``begin`` of the layout on."""
        if segment.has_plane(Plane.REMAINDER):
            # The split rounds half-way cases its own way, so it must also make the copies that compute uses.
            self._split_piecewise(segment, begin, flat, torch.empty(0, dtype=torch.int16))
        else:
            _copy_range(segment, begin, flat)


def _given_bytes(segment: Segment) -> int:
    """Of the parameters as the model was built with them."""
    return sum(parameter.numel() * parameter.itemsize for parameter in segment.parameters)


def _copy_range(segment: Segment, begin: int, into: torch.Tensor) -> None:
    """Copy elements [begin, begin + len(into)) of the flat layout from the parameters as they are now; gaps are left."""
    end = begin + into.numel()
    for slot, parameter in zip(segment.layout.slots, segment.parameters, strict=True):
        first, last = max(slot.offset, begin), min(slot.end, end)
        if first < last:
            flat = parameter.detach().reshape(-1)
            into[first - begin : last - begin].copy_(flat[first - slot.offset : last - slot.offset])
