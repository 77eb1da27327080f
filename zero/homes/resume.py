"""Whether the state that a job's folders kept is gone on with."""

from collections.abc import Sequence

from lamina.tiers import GenerationStore, StoreError, Tier
from lamina.zero.groups.segment import Segment
from lamina.zero.options import ZeroOptions
from lamina.zero.ranks.collectives import Ranks

RESUMING = "comparing the steps that were kept"
MOST_KEPT = 3
"""Generations of a store at most."""


def is_to_resume(
    store: GenerationStore | None, segments: Sequence[Segment], options: ZeroOptions, ranks: Ranks
) -> bool:
    """Collective. ``options.resume`` True: the state must be there; False: it is dropped; "auto": gone on with where there is
    any; None: as False, but state of a step that was taken is not dropped. Raises StoreError, ValueError."""
    wanted, keeps = options.resume, options.keep_state
    if wanted and not keeps:
        raise ValueError("resume needs tiers.keep_state: true, so that there is state to go on with")
    current = store.current if store is not None else None
    found = ranks.union([current is None])[0] is False
    if not found and wanted is True:
        raise StoreError(f"resume: job {options.job!r} has no committed state: leave resume out to start anew")
    if found and wanted is None and keeps and current is not None and current.step > 0:
        raise StoreError(
            f"job {options.job!r} has kept the state of step {current.step}: pass resume=True to go on from it, "
            f"resume=False to drop it, or use another tiers.job"
        )
    if not (found and wanted):
        return False
    if store is not None and current is not None:
        _agree(store, ranks)
    lost = [s.name for s in segments if s.trainable and (s.state_tier is not Tier.NVME or s.kept)]
    if lost:
        raise StoreError(
            f"resume: the optimizer state of {', '.join(lost[:4])} is placed in memory, which did not survive: load a "
            f"checkpoint, or put all of it on nvme"
        )
    return True


def _agree(store: GenerationStore, ranks: Ranks) -> None:
    """Go back to the last step that all ranks have kept: when they were killed some may have committed one more than others.
    Collective. Raises StoreError."""
    rows = ranks.gather_numbers([*store.steps, *[-1.0] * MOST_KEPT][:MOST_KEPT], RESUMING)
    kept = [[int(step) for step in row if step >= 0] for row in rows]
    newest = [steps[0] for steps in kept]
    if len(set(newest)) == 1:
        return
    common = set(kept[0]).intersection(*kept)
    step, cause = max(common, default=-1), None
    if common and newest[ranks.rank] != step:
        try:
            store.go_back(step)
        except (OSError, StoreError) as error:
            cause = error
    if not common or ranks.union([cause is not None])[0]:
        why = f"the last that all have, {step}, is not whole any more on all" if common else "none is the same on all"
        raise StoreError(
            f"resume: the ranks have kept different steps, {newest}; {why}: load a checkpoint instead"
        ) from cause
