"""The optimizer over all tiers: param groups and step counts as torch knows them, the work done by the updater.

An update may start before ``step()``: under the rest of the backward pass, as soon as a segment's gradient is final.
It goes into the next generation, which is not current until ``step()`` commits it; if a rate or a gradient was changed
in between, the segment is simply updated again from the current generation.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lamina.tiers import GenerationStore, Transaction
from lamina.zero.adam.kernels import AdamHyper, Kernels
from lamina.zero.adam.plain_optimizer import PlainOptimizer
from lamina.zero.gradients.norm import GradientNorm, clip_factor
from lamina.zero.gradients.plane import GradientPlane
from lamina.zero.gradients.planes import Gradients
from lamina.zero.groups.segment import Segment
from lamina.zero.ranks.collectives import Ranks

from .update import Updater
from .update_job import Run, UpdateJob


@dataclass(frozen=True, kw_only=True)
class AdamDefaults:
    """Hyper-parameters of a param group that does not set its own; torch's names and meanings."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    adamw_mode: bool = True
    bias_correction: bool = True
    maximize: bool = False


@dataclass(kw_only=True)
class _Early:
    """An update that was started before ``step()``: what it assumed."""

    runs: Sequence[Run]
    arrived: frozenset[int]
    grad_multiplier: float


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step did: the global gradient norm before clipping, and the factor that gradients were multiplied by."""

    grad_norm: float
    grad_multiplier: float
    redone: int  # segments whose early update was dropped and done again
    update_s: float = 0.0
    commit_s: float = 0.0
    skipped: bool = False  # the gradient was not finite and nothing was changed


class Migrating(Protocol):
    """State that changes its home with the generation that a step writes."""

    @property
    def under_way(self) -> bool:
        """Whether some does: the step's commit is then waited for."""

    def before_generation(self) -> None: ...

    def write(self, transaction: Transaction) -> None:
        """Everything is updated: what moves is written, too."""

    def generation_dropped(self) -> None: ...


class Copies(Protocol):
    """Fetched copies of groups' parameters, which an update makes stale or renews; see tiers/schedule/executor.py."""

    def change(self, index: int) -> bool:
        """Whether the update may write into the group's copy."""

    def changes_dropped(self) -> None: ...

    def committed(self, changed: AbstractSet[int], renewed: AbstractSet[int]) -> None: ...


class TieredAdam(PlainOptimizer):
    """Adam or AdamW whose state lives on any tier. ``param_groups`` can be changed between steps as with torch.

    ``step()`` finishes the update of all segments and begins to commit the generation. ``state`` stays empty: use
    ``lamina.zero.get_full`` / ``set_full`` to read or write a moment.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        defaults: AdamDefaults,
        *,
        segments: Sequence[Segment],
        gradients: Gradients,
        updater: Updater,
        kernels: Kernels,
        store: GenerationStore | None,
        ranks: Ranks | None = None,
        clip_norm: float = 0.0,
        retain_gradients: bool = True,
    ) -> None:
        # Before super(): torch's constructor calls add_param_group and hooks that may look at these.
        self._segments = [segment for segment in segments if segment.trainable]
        self._gradients = gradients
        self._updater = updater
        self._store = store
        self._ranks = ranks or Ranks()
        self._transaction: Transaction | None = None
        self._early: dict[int, _Early] = {}
        self._norm = GradientNorm(self._segments, gradients, kernels, self._ranks)
        self._updated: dict[int, frozenset[int]] = {}
        self._jobs: dict[int, UpdateJob] = {}  # the last one of each segment in this window
        self._group_of: dict[int, int] = {}  # index of each parameter's param group, found when it is asked for
        self._late = False  # whether the last step's commit may wait for updates
        self.migration: Migrating | None = None
        self.copies: Copies | None = None
        self.clip_norm = clip_norm
        self.retain_gradients = retain_gradients
        self.param_steps: dict[int, int] = {
            id(parameter): 0 for segment in self._segments for parameter in segment.parameters
        }
        self.generation_meta: Callable[[], Mapping[str, object]] = dict
        self.outcome = StepOutcome(grad_norm=0.0, grad_multiplier=1.0, redone=0)
        super().__init__(params, vars(defaults).copy())

    @property
    def updating(self) -> bool:
        """Whether a generation is open: an update was started and not yet committed."""
        return self._transaction is not None

    def started_early(self, segment: Segment) -> bool:
        """Whether the segment's update was started in this window."""
        return id(segment) in self._early

    # -- before the step ----------------------------------------------------------------------------------------

    def start_early(self, segment: Segment, *, copy_in_use: bool = False) -> None:
        """Begin the update of a segment whose gradient is final, under the rest of the backward pass, which may still need
        the fetched copy of its group."""
        plane = self._gradients[segment]
        self._norm.take(segment)
        runs = self._runs(plane, plane.arrived)
        self._early[id(segment)] = _Early(runs=runs, arrived=frozenset(plane.arrived), grad_multiplier=1.0)
        # What is kept in memory could not be undone: that waits, with the gradient, for the step.
        release = not self.retain_gradients and not segment.kept
        self._submit(plane, runs, 1.0, release=release, in_place=False, copy_in_use=copy_in_use)

    def settle(self) -> None:
        """Return once every update that was started has used its gradient, and written into copies what it writes there."""
        self._updater.finish_jobs()

    def discard(self) -> None:
        """Forget the gradients of this window and every early update: nothing has happened."""
        try:
            self._updater.drain()
        finally:
            self._end_window(commit=False, step=0)

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Like ``finish`` with an unscaled gradient; through an engine, call ``engine.step()`` instead."""
        if closure is not None:
            raise ValueError("TieredAdam.step takes no closure: forward and backward run through the engine")
        self.finish(step=max(self.param_steps.values(), default=0) + 1)

    @torch.no_grad()
    def finish(self, *, step: int, grad_scale: float = 1.0, skip_nonfinite: bool = False) -> None:
        """Update everything that has a gradient and commit it as training step ``step``; ``grad_scale`` divides the
        gradients (loss scaling). When it raises, the last committed generation is still the current one.

        It returns when all is computed. The last writes, and with them the commit, may still be under way: the store waits for
        them where it must, and tells what went wrong.

        ``skip_nonfinite``: when a gradient is infinite or NaN (its norm tells, without another pass), drop the window and
        change nothing; every rank decides alike. Updates must not have been started early then."""
        began = time.perf_counter()
        norm = self.grad_norm() / grad_scale
        if skip_nonfinite and not math.isfinite(norm):
            self.discard()
            self.outcome = StepOutcome(grad_norm=norm, grad_multiplier=1.0, redone=0, skipped=True)
            return
        multiplier = clip_factor(norm, self.clip_norm) / grad_scale
        try:
            redone = self._update_all(multiplier)
        except BaseException:
            try:
                self._updater.settle()  # by Ctrl-C, say, it may be cut while updates still write into the generation
            finally:
                self._end_window(commit=False, step=step)
            raise
        updated = time.perf_counter()
        self._end_window(commit=True, step=step)
        self.outcome = StepOutcome(
            grad_norm=norm,
            grad_multiplier=multiplier,
            redone=redone,
            update_s=updated - began,
            commit_s=time.perf_counter() - updated,
        )

    def _update_all(self, multiplier: float) -> int:
        """Update what was not updated early, and again what was updated with other numbers; returns how many of those. Late
        updates are asked for."""
        if self._store is not None and self._late:
            self._store.settle()  # what went wrong with the last step's late updates is told before anything is changed
            self._late = False
        late = self._late_segments()
        for segment in self._segments:
            if segment in late:
                continue
            plane, started = self._gradients[segment], id(segment) in self._early
            if plane.arrived and (segment.kept or not started):
                runs = self._runs(plane, plane.arrived)
                self._submit(plane, runs, multiplier, release=not started, stored=not started)
        self._updater.finish()
        stale = [
            plane
            for segment in self._segments
            if (early := self._early.get(id(segment)))
            and self._is_stale(plane := self._gradients[segment], early, multiplier)
        ]
        for plane in stale:
            runs = self._runs(plane, plane.arrived)
            self._submit(plane, runs, multiplier, release=True, from_store=True, in_place=False)
        self._updater.finish()
        for segment in late:
            plane = self._gradients[segment]
            self._submit(plane, self._runs(plane, plane.arrived), multiplier, release=True, late=True)
        self._late = bool(late)
        return len(stale)

    def _late_segments(self) -> list[Segment]:
        """Those whose update the step need not wait for. None while state moves: that commit is waited for."""
        if self.migration is not None and self.migration.under_way:
            return []
        return [segment for segment in self._segments if segment.late and self._gradients[segment].arrived]

    def grad_norm(self) -> float:
        """Global norm of the accumulated gradients, the same wherever they lie. Collective."""
        return self._norm.value()

    def _is_stale(self, plane: GradientPlane, early: _Early, multiplier: float) -> bool:
        """Whether an early update used other numbers than the step would; raises when it cannot be done again."""
        same = (
            not plane.edited
            and early.grad_multiplier == multiplier
            and list(early.runs) == self._runs(plane, early.arrived)
        )
        if not same and not plane.present:
            raise RuntimeError(
                f"{plane.segment.name} was updated during the backward pass and its gradient given up, but its rates were "
                f"changed before step(). Write tiers.overlap_update: false, or raise tiers.host_bytes so that gradients fit"
            )
        return not same

    # -- jobs ---------------------------------------------------------------------------------------------------

    def _submit(
        self,
        plane: GradientPlane,
        runs: Sequence[Run],
        multiplier: float,
        *,
        release: bool,
        from_store: bool = False,
        in_place: bool = True,
        stored: bool = True,
        copy_in_use: bool = False,
        late: bool = False,
    ) -> None:
        def done(job: UpdateJob) -> None:
            if release:
                job.gradient.release()

        copy = None if copy_in_use else self._copy_to_renew(plane.segment)
        if copy is None and self._ranks.world_size > 1 and not plane.segment.updated_where_used:
            from_store = True  # see [Note: copies on several ranks]
        transaction = self._open_transaction(plane.segment)
        self._updated[id(plane.segment)] = frozenset(plane.arrived)
        promised = late and transaction is not None
        job = UpdateJob(
            segment=plane.segment,
            gradient=self._gradients.hold(plane.segment) if promised else plane,
            runs=runs,
            grad_multiplier=multiplier,
            done=done,
            from_store=from_store,
            in_place=in_place,
            stored=stored,
            copy=copy,
            promise=transaction.promise(plane.segment.name) if promised and transaction is not None else None,
        )
        self._jobs[id(plane.segment)] = job
        self._updater.submit(job, transaction)

    def _copy_to_renew(self, segment: Segment) -> "weakref.ref[torch.Tensor] | None":
        if self.copies is None or not segment.copy_renewable or segment.flat is None:
            return None
        return weakref.ref(segment.flat) if self.copies.change(segment.group) else None

    def _open_transaction(self, segment: Segment) -> Transaction | None:
        if segment.stored_planes and self._transaction is None:
            if self._store is None:
                raise RuntimeError(f"{segment.name} has NVMe-resident state but no store")
            if self.migration is not None:
                self.migration.before_generation()
            self._transaction = self._store.begin()
        return self._transaction

    def _runs(self, plane: GradientPlane, arrived: AbstractSet[int]) -> list[Run]:
        """Consecutive parameters with the same hyper-parameters, as ranges of this rank's shard."""
        segment = plane.segment
        runs: list[Run] = []
        last_slot = -2
        for slot, first, last in segment.layout.pieces(segment.rank):
            hyper = self._hyper(segment.parameters[slot]) if slot in arrived else None
            if hyper is None:
                continue
            if runs and runs[-1].hyper == hyper and last_slot == slot - 1:
                runs[-1] = Run(begin=runs[-1].begin, end=last, hyper=hyper)
            else:
                runs.append(Run(begin=first, end=last, hyper=hyper))
            last_slot = slot
        return runs

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._group_of = {}

    def _hyper(self, parameter: torch.Tensor) -> AdamHyper | None:
        """A parameter's hyper-parameters for its next step; None for one that is in no group."""
        if not self._group_of:
            self._group_of = {
                id(member): index for index, group in enumerate(self.param_groups) for member in group["params"]
            }
        index = self._group_of.get(id(parameter))
        if index is None:
            return None
        group = self.param_groups[index]
        beta1, beta2 = group["betas"]
        return AdamHyper(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=self.param_steps.get(id(parameter), 0) + 1,
            adamw_mode=bool(group["adamw_mode"]),
            maximize=bool(group["maximize"]),
            bias_correction=bool(group["bias_correction"]),
        )

    def _end_window(self, *, commit: bool, step: int) -> None:
        """Close the window, whatever happens in it; when the commit fails no step was counted."""
        transaction, self._transaction = self._transaction, None
        committed = False
        try:
            if commit:
                self._commit(transaction, step)
                committed = True
                self._settle_copies()
                self._updater.read_ahead()
        finally:
            if self._late and not committed:
                self._updater.settle()  # late updates still write into what is dropped
            if transaction is not None:
                transaction.abort()  # does nothing after a commit
                if not committed and self.migration is not None:
                    self.migration.generation_dropped()
            if not committed and self.copies is not None:
                self.copies.changes_dropped()
            self._early.clear()
            self._norm.forget()
            self._updated.clear()
            self._jobs.clear()
            self._gradients.release_all()

    def _commit(self, transaction: Transaction | None, step: int) -> None:
        counted = [
            id(segment.parameters[slot]) for segment in self._segments for slot in self._updated.get(id(segment), ())
        ]
        # Counted first: what the generation remembers has this step in it.
        for key in counted:
            self.param_steps[key] += 1
        try:
            for segment in self._segments:
                if segment.replicated and segment.layout.world_size > 1 and segment.flat is not None:
                    self._ranks.all_gather(segment.flat)
            if transaction is not None:
                if self.migration is not None:
                    self.migration.write(transaction)
                transaction.copy_rest()
                moving = self.migration is not None and self.migration.under_way
                began, spans = time.perf_counter(), self._updater.spans
                transaction.commit(
                    step,
                    self.generation_meta(),
                    background=not moving,
                    landed=lambda: spans.add("commit", f"step {step}", began, time.perf_counter()),
                )
        except BaseException:
            for key in counted:
                self.param_steps[key] -= 1
            raise

    def _settle_copies(self) -> None:
        """Tell which fetched copies are stale now, and which of them were renewed."""
        if self.copies is None:
            return
        updated = [(s, self._jobs[id(s)]) for s in self._segments if id(s) in self._jobs and not s.in_place]
        changed = {segment.group for segment, _ in updated}
        self.copies.committed(changed, changed - {segment.group for segment, job in updated if not job.renewed})
