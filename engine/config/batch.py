"""The arithmetic of the batch: global = micro-batch per rank x accumulation steps x ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """A consistent set: `train == micro * accumulation * world_size`, in samples."""

    train: int
    micro: int
    accumulation: int
    world_size: int


class BatchContradiction(ValueError):
    """The given sizes cannot all hold."""


def resolve_batch(*, train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> BatchSizes:
    """Derive the sizes that are not given (None). Each given one is >= 1, and so is `world_size`.

    With micro-batch or global batch alone, accumulation is 1; with accumulation alone, or nothing, the
    micro-batch is 1. Raises BatchContradiction with all four numbers when what is given cannot hold.
    """
    sizes = {"train": train, "micro": micro, "accumulation": accumulation}
    if any(size is not None and size < 1 for size in sizes.values()) or world_size < 1:
        raise BatchContradiction(f"{_shown(sizes, world_size)}: each must be at least 1")
    if train is None:
        micro = 1 if micro is None else micro
        accumulation = 1 if accumulation is None else accumulation
        train = micro * accumulation * world_size
    elif micro is None:
        accumulation = 1 if accumulation is None else accumulation
        micro = train // (accumulation * world_size)
    elif accumulation is None:
        accumulation = train // (micro * world_size)
    if micro * accumulation * world_size != train or not (micro and accumulation):
        raise BatchContradiction(_explain(sizes, world_size))
    return BatchSizes(train=train, micro=micro, accumulation=accumulation, world_size=world_size)


def _shown(sizes: dict[str, int | None], world_size: int) -> str:
    def text(size: int | None) -> str:
        return "not given" if size is None else str(size)

    return (
        f"train_batch_size {text(sizes['train'])}, train_micro_batch_size_per_gpu {text(sizes['micro'])}, "
        f"gradient_accumulation_steps {text(sizes['accumulation'])}, world size {world_size}"
    )


def _explain(sizes: dict[str, int | None], world_size: int) -> str:
    train = sizes["train"]
    assert train is not None  # without a global size there is nothing to contradict
    divisor = world_size * (sizes["micro"] or 1) * (sizes["accumulation"] or 1)
    shown = _shown(sizes, world_size)
    if sizes["micro"] is not None and sizes["accumulation"] is not None:
        return (
            f"{shown} contradict each other: micro-batch x accumulation x world size is {divisor}, "
            f"not {train}; write train_batch_size {divisor}, or leave one of the three out"
        )
    below = train // divisor * divisor
    near = f"{below} or {below + divisor}" if below else str(divisor)
    return (
        f"{shown}: {train} is not a multiple of {divisor}, so the missing size is not whole; "
        f"the nearest train_batch_size that works is {near}"
    )
