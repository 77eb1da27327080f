"""The state of a client's optimizer in a checkpoint, put together for the masters of this rank at any world size.

What has an element for each of its parameter's is cut and joined as the parameters are; scalars (step counts) are the same on
every rank. Anything else (rows and columns of a factored optimizer) belongs to whole matrices, which another number of ranks
does not have.
"""

from collections.abc import Iterator

import torch

from lamina.zero.groups.shard_planes import bytes_of
from lamina.zero.step.client_optimizer import ClientOptimizer

from .record import ClientTensor, SegmentRecord, SlotRecord
from .source import CheckpointSource


class ClientStateSource:
    """Tensors by parameter and key, from the parts of all ranks."""

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self._found: dict[tuple[str, str], list[tuple[int, ClientTensor]]] = {}
        for rank, part in enumerate(source.parts):
            for tensor in part.record.client:
                self._found.setdefault((tensor.parameter, tensor.key), []).append((rank, tensor))

    def check(self, optimizer: ClientOptimizer) -> None:
        """Raises ValueError, naming them, for tensors that cannot be cut for another number of ranks."""
        for master in optimizer.master_slices():
            for key, entries in self._of(master.name):
                if not _is_scalar(entries) and list(self._pieces(master.name, entries)) == []:
                    shapes = ", ".join(str(list(tensor.shape)) for _, tensor in entries)
                    raise ValueError(
                        f"{key} of {master.name} has shape {shapes} in the checkpoint, not one element for each of its own: "
                        f"such a client's optimizer resumes at the world size and stage it was saved at. Load with "
                        f"load_optimizer_states=False to start it anew"
                    )

    def tensors(self, optimizer: ClientOptimizer) -> dict[tuple[str, str], torch.Tensor]:
        """What each of this rank's masters needs."""
        found = {}
        for master in optimizer.master_slices():
            for key, entries in self._of(master.name):
                if _is_scalar(entries):
                    found[(master.name, key)] = self._read(*entries[0])
                    continue
                slot, _ = self._place(master.name)
                whole = torch.zeros(slot.numel, dtype=entries[0][1].dtype)
                for first, last, rank, tensor in self._pieces(master.name, entries):
                    whole[first:last] = self._read(rank, tensor).reshape(-1)
                found[(master.name, key)] = whole[master.first : master.last].clone().view(master.shape)
        return found

    def as_saved(self, rank: int) -> dict[tuple[str, str], torch.Tensor]:
        """Those of one rank's part, whatever they are."""
        return {(t.parameter, t.key): self._read(rank, t) for t in self._source.parts[rank].record.client}

    def _of(self, name: str) -> Iterator[tuple[str, list[tuple[int, ClientTensor]]]]:
        for (parameter, key), entries in self._found.items():
            if parameter == name:
                yield key, entries

    def _pieces(
        self, name: str, entries: list[tuple[int, ClientTensor]]
    ) -> Iterator[tuple[int, int, int, ClientTensor]]:
        """Elements [first, last) of the parameter that each rank's tensor has; none where one does not fit."""
        slot, segment = self._place(name)
        found = []
        for rank, tensor in entries:
            start = 0 if segment.world_size == 1 else rank * segment.shard_numel
            first = max(slot.offset, start) - slot.offset
            last = min(slot.offset + slot.numel, start + segment.shard_numel) - slot.offset
            if tensor.shape not in ((last - first,), slot.shape) or torch.Size(tensor.shape).numel() != last - first:
                return
            found.append((first, last, rank, tensor))
        yield from found

    def _place(self, name: str) -> tuple[SlotRecord, SegmentRecord]:
        for segment in self._source.parts[0].record.segments:
            for slot in segment.slots:
                if slot.name == name:
                    return slot, segment
        raise KeyError(name)

    def _read(self, rank: int, tensor: ClientTensor) -> torch.Tensor:
        flat = torch.empty(torch.Size(tensor.shape).numel(), dtype=tensor.dtype)
        if flat.numel():
            self._source.parts[rank].file().read(tensor.parameter, tensor.plane, 0, bytes_of(flat))
        return flat.view(tensor.shape)


def _is_scalar(entries: list[tuple[int, ClientTensor]]) -> bool:
    return all(tensor.shape == () for _, tensor in entries)
