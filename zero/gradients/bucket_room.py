"""Memory of the device tier for the buckets in which several ranks' gradients are summed."""

from contextlib import ExitStack

from lamina.tiers import Arena, Block, BudgetError, Executor, Tier
from lamina.zero.options import ZeroOptions


class BucketRoom:
    """Several ``loss.backward()`` of the user's own before a ``step()`` need more of it than is planned: without a budget it
    is added, with one BudgetError is raised."""

    def __init__(self, executor: Executor, options: ZeroOptions, closing: ExitStack) -> None:
        self._executor = executor
        self._options = options
        self._closing = closing
        self._added: list[Arena] = []

    def alloc(self, nbytes: int, owner: str) -> Block:
        """Raises BudgetError."""
        budget = self._options.budgets.device_bytes
        try:
            return self._executor.make_room(nbytes, owner, patient=budget is not None)
        except BudgetError as error:
            if budget is not None:
                error.add_note(
                    "gradients of a second loss.backward() wait for step() beside those of the first: call "
                    "engine.backward(loss) for each loss, which brings them together over the ranks at once"
                )
                raise
        for added in self._added:
            if (block := added.try_alloc(nbytes, owner)) is not None:
                return block
        accelerator = self._options.accelerator
        arena = accelerator.arena(nbytes) if accelerator is not None else Arena(Tier.DEVICE, nbytes)
        self._closing.callback(arena.close)
        self._added.append(arena)
        return arena.alloc(nbytes, owner)

    def give_back(self, block: Block) -> None:
        self._executor.give_back(block)
