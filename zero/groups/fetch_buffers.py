"""Page-locked host memory through which NVMe-resident parameters pass on their way to an accelerator."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lamina.tiers import Block
from lamina.tiers.memory.gpu import Accelerator


@dataclass(kw_only=True)
class FetchBuffers:
    """A few equal blocks that go round: taken for a read, given back with the event of the copy that empties them."""

    blocks: Sequence[Block]
    _free: list[Block] = field(default_factory=list)
    _returning: deque[tuple[Any, Block]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._free = list(self.blocks)

    def take(self, *, wait: bool) -> Block | None:
        """A block; None when all are in use. ``wait``: wait for one whose copy is under way."""
        while self._returning and (Accelerator.has_happened(self._returning[0][0]) or (wait and not self._free)):
            event, block = self._returning.popleft()
            Accelerator.wait(event)
            self._free.append(block)
        return self._free.pop() if self._free else None

    def give_back(self, block: Block, event: Any) -> None:
        """The block can be used again once ``event`` has happened."""
        self._returning.append((event, block))

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)
