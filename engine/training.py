"""The training engine: forward, backward, step, and what they cost."""

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lamina.zero import ClientOptimizer, TieredAdam, ZeroRuntime
from lamina.zero.checkpoint.target import reread_homes
from lamina.zero.passes.closed_forward import refuse_forward

from .checkpoint.loading import LoadReport
from .checkpoint.pending import PendingSave
from .checkpoint.progress import generation_meta
from .config import EngineConfig
from .data import ResumableLoader
from .face import EngineFace, cast_floating, loss_of
from .loss_scale import LossScaleError, LossScaler
from .meter import StepFacts, StepMeter
from .metrics import StepMetrics
from .monitors import Monitors
from .persistence import EnginePersistence
from .plan_text import TrainingPlan
from .progress_lines import progress_lines
from .schedule_step import advance_schedule
from .shutdown import StopSignals
from .window import AccumulationWindow


class TrainingEngine(EnginePersistence, EngineFace):
    """Trains one module whose state lies on several tiers. Made by ``initialize``; also a context manager.

    ``engine(batch)`` is the forward pass of one micro-batch, ``backward(loss)`` its backward pass and ``step()`` acts
    at the accumulation boundary only (see [Note: accumulation window]). ``global_steps`` counts boundaries, skipped ones
    included, as DeepSpeed does; ``skipped_steps`` those whose gradient was not finite.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        config: EngineConfig,
        runtime: ZeroRuntime,
        scaler: LossScaler,
        plan: TrainingPlan,
        monitors: Monitors,
        training_dataloader: ResumableLoader | None = None,
        save_on_stop: str | os.PathLike[str] | None = None,
        handle_signals: bool = True,
    ) -> None:
        self.module = module
        self.config = config
        self.plan = plan
        self.optimizer: TieredAdam | ClientOptimizer | None = runtime.optimizer
        self.lr_scheduler: Any = None
        self.training_dataloader = training_dataloader
        self.global_steps = 0
        self.skipped_steps = 0
        self.load_report: LoadReport | None = None
        self.runtime = runtime
        self.scaler = scaler
        self.window = AccumulationWindow(config.gradient_accumulation_steps)
        self._meter = StepMeter(runtime)
        plan.changes = self._meter.steering.notes
        self._monitors = monitors
        self._metrics: StepMetrics | None = None
        self._losses: list[torch.Tensor] = []
        self._batches: Iterator[Any] | None = None
        self._pending_save: PendingSave | None = None
        self._applied = False
        self.soundness = runtime.soundness
        self.soundness.drop_window = self._forget_window
        self._busy = False
        self._before_draw: dict[str, Any] | None = None
        if self.optimizer is not None and config.tiers.keep_state:
            self.optimizer.generation_meta = lambda: generation_meta(self)
        atexit.register(self.close)  # a script that ends without close() leaves nothing behind either
        self._signals: StopSignals | None = None
        if handle_signals:
            me = weakref.ref(self)

            def stop() -> None:
                engine = me()
                if engine is not None:
                    engine._stop(save_on_stop)

            ranks = runtime.ranks
            self._signals = StopSignals(
                is_busy=lambda: (engine := me()) is not None and engine._busy,
                stop=stop,
                share=ranks.greatest if ranks.world_size > 1 else None,
            )

    # -- the three calls -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on one micro-batch and return what it returns, unscaled."""
        self.soundness.refuse("forward")
        began = time.perf_counter()
        self._busy = self._busy or self.module.training
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = cast_floating(args, torch.float16), cast_floating(kwargs, torch.float16)
        with self.soundness.meeting_lost_commit(), self.runtime.forward_context():
            output = self.module(*args, **kwargs)
        if self.module.training:
            self._meter.forward_took(began)
        return output

    def scale(self, loss: torch.Tensor, *, scale_wrt_gas: bool = True) -> torch.Tensor:
        """The loss (or any output) as its ``backward`` must be called on by hand: divided by the accumulation steps and,
        in fp16, multiplied by the loss scale. ``engine.scale(loss).backward()`` equals ``engine.backward(loss)``."""
        self.window.is_scaled = True
        scaled = loss
        if self.scaler.scale != 1.0 and loss.dtype in (torch.float16, torch.bfloat16):
            scaled = scaled.float()  # the scale does not fit fp16
        if scale_wrt_gas and self.window.length > 1:
            scaled = scaled / self.window.length
        return scaled * self.scaler.scale if self.scaler.scale != 1.0 else scaled

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, computed again in the backward pass instead of keeping what autograd saves.

        For parts of a model that ``tiers.activations`` does not find; it says where the inputs wait ("keep": as they are).
        DeepSpeed's ``checkpointing.checkpoint``.
        """
        return self.runtime.recomputer(getattr(function, "__qualname__", repr(function)), function, args, kwargs)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward pass of one micro-batch; the gradient is the mean over the accumulation window. Returns ``loss``.

        May be called for several losses of one micro-batch (``retain_graph`` where they share a graph); their gradients
        add up. Raises ValueError for a loss that is not a scalar or has no graph. After any error in it, ``zero_grad()``
        drops the window and training can go on.
        """
        self.soundness.refuse("backward")
        self._require_optimizer("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"backward wants a scalar loss, got {shape}: reduce it first, loss.mean() say")
        if not loss.requires_grad:
            raise ValueError("the loss has no graph: was it computed under no_grad, or are all parameters frozen?")
        began = time.perf_counter()
        scaled = self.scale(loss, scale_wrt_gas=scale_wrt_gas)
        with self.soundness.meeting_lost_commit():
            self._run_backward(scaled, retain_graph=retain_graph)
        self._meter.backward_took(began)
        self._note_loss(loss)
        return loss

    def _run_backward(self, scaled: torch.Tensor, *, retain_graph: bool) -> None:
        self.runtime.begin_backward(last_of_window=self.window.is_last and not retain_graph, root=scaled)
        succeeded = False
        try:
            with self.runtime.forward_context():
                # The edge, not the tensor: as a torch function, backward would take the modes that watch those off meanwhile.
                # Without a gradient, which is one then: to compare the shape of a given one torch would load a whole algebra.
                edges = (torch.autograd.graph.get_gradient_edge(scaled),)
                torch.autograd.backward(edges, retain_graph=retain_graph)
            succeeded = True
        finally:
            self.runtime.end_backward(succeeded=succeeded)

    def step(self) -> None:
        """Close the micro-batch; at the accumulation boundary update, commit and step the schedule.

        What is written to NVMe may still be under way when it returns, and with it the commit: a kill before the next
        ``backward()``, ``save_checkpoint()`` or ``close()`` resumes from this step or from the one before. If the commit fails,
        the next call of the engine raises why; see zero/soundness.py.

        A gradient that is not finite skips the update (fp16, or bf16.check_grad_overflow): nothing changes but the loss
        scale. Raises LossScaleError at the least scale, RuntimeError for gradients whose loss was not scaled.
        """
        self.soundness.refuse("step")
        optimizer = self._require_optimizer("step")
        self._take_own_backward()
        self._applied = False
        if self.window.close_micro_batch():
            self._take_step(optimizer)
        self._busy = False
        if self._signals is not None:
            self._signals.act()

    def _take_step(self, optimizer: TieredAdam | ClientOptimizer) -> None:
        """At the accumulation boundary."""
        rates = self.get_lr()
        self.runtime.close_window()
        self._require_gradients()
        scale = self.scaler.scale
        self._update(optimizer, scale)
        self.global_steps += 1
        self._applied = not optimizer.outcome.skipped
        try:
            if self._applied:
                self.scaler.update(overflow=False)
                if self.lr_scheduler is not None:
                    advance_schedule(self.lr_scheduler)
            else:
                self.skipped_steps += 1
                self.scaler.update(overflow=True)
        except LossScaleError:
            self._busy = False
            raise
        with self.soundness.meeting_lost_commit():
            self._tell(rates, scale)

    def _update(self, optimizer: TieredAdam | ClientOptimizer, scale: float) -> None:
        config = self.config
        try:
            optimizer.finish(
                step=self.global_steps + 1,
                grad_scale=scale,
                skip_nonfinite=config.fp16.enabled or config.bf16.check_grad_overflow,
            )
        except BaseException as error:
            self.window.forget()
            self.soundness.recover("a step", error)
            raise
        with self.soundness.meeting_lost_commit():
            self.runtime.finish_step(applied=not optimizer.outcome.skipped)

    def _take_own_backward(self) -> None:
        """Gradients that the user's own ``backward()`` brought: refuse unscaled ones, reduce them over the ranks."""
        runtime = self.runtime
        fresh = any(plane.fresh for plane in runtime.gradients.planes.values())
        if fresh and not self.window.is_scaled and (self.scaler.scale != 1.0 or self.window.length > 1):
            self.zero_grad()
            raise RuntimeError(
                f"gradients came from a loss that was not scaled (loss scale {self.scaler.scale:g}, "
                f"{self.window.length} accumulation steps): call engine.scale(loss).backward() or engine.backward(loss). "
                f"The window was dropped"
            )
        runtime.take_own_backward()

    def _require_gradients(self) -> None:
        """With ignore_unused_parameters false: every trained parameter must have had a gradient in the window."""
        if self.config.zero_optimization.ignore_unused_parameters:
            return
        unused = [
            slot.name
            for segment in self.runtime.segments
            if segment.trainable
            for index, slot in enumerate(segment.layout.slots)
            if index not in self.runtime.gradients[segment].arrived
        ]
        if unused:
            self.zero_grad()
            raise RuntimeError(
                f"no gradient for {', '.join(unused)} (zero_optimization.ignore_unused_parameters is false). The window "
                f"was dropped"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the open window: nothing of it has happened. Not needed after ``step()``."""
        del set_to_none
        if self._forget_window():
            reread_homes(self.runtime)

    def _forget_window(self) -> bool:
        """True where homes in memory are to be read again."""
        self.window.forget()
        self._losses.clear()
        return self.runtime.drop_window()

    # -- whole batches -------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """A whole global batch: micro-batches of ``data_iter`` up to the boundary; returns the mean loss.

        Each item is a tuple or list (positional arguments), a mapping (keyword arguments), or one argument; the module
        returns the loss, or a tuple, mapping or object whose ``loss`` or first item it is. Without ``data_iter`` the loader
        made from ``training_data`` is used, epoch after epoch. When the data ends in mid-window, StopIteration is raised
        and the window stays open: see [Note: accumulation window].
        """
        batches = self._batches_of(data_iter)
        losses = []
        last = False
        while not last:
            batch = self._draw(batches)
            last = self.window.is_last
            loss = loss_of(self._call_with(batch))
            self.backward(loss)
            self.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def eval_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """Mean loss over ``gradient_accumulation_steps`` micro-batches, without gradients and in eval mode."""
        batches = self._batches_of(data_iter)
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                losses = [loss_of(self._call_with(next(batches))) for _ in range(self.window.length)]
        finally:
            self.module.train(was_training)
        return torch.stack(losses).mean()

    def _batches_of(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            batches: Iterator[Any] = iter(data_iter)
            if batches is not data_iter:
                raise TypeError(
                    f"train_batch wants an iterator, got {type(data_iter).__name__}, which would start over with every "
                    f"call: pass iter(…), made once"
                )
            return batches
        if self.training_dataloader is None:
            raise ValueError("train_batch needs data_iter, or training_data given to initialize()")
        if self._batches is None:
            self._batches = self.training_dataloader.repeat()
        return self._batches

    def _draw(self, batches: Iterator[Any]) -> Any:
        """The next batch. A stop signal that comes meanwhile finds the loader where it was before."""
        loader = self.training_dataloader
        self._before_draw = loader.state_dict() if loader is not None and batches is self._batches else None
        batch = next(batches)
        self._before_draw = None
        return batch

    def _call_with(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, tuple | list) else self(batch)

    # -- the window ----------------------------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        """Micro-batches closed by ``step()`` since the start of training."""
        return self.window.micro_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step()`` updates."""
        return self.window.is_last

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next ``step()`` updates, until told otherwise; None counts micro-batches again."""
        self.window.forced = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate, and ``step()`` inside is an error."""
        return self.window.no_sync()

    # -- state that users ask for --------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> "TrainingEngine":
        self.module.train(mode)
        return self

    def eval(self) -> "TrainingEngine":
        return self.train(False)

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` changed the parameters."""
        return self._applied

    def get_global_grad_norm(self) -> float:
        """Norm of the last window's gradient before clipping; not finite when the step was skipped."""
        return self._require_optimizer("get_global_grad_norm").outcome.grad_norm

    def get_lr(self) -> list[float]:
        """The rate of each param group that the next step will use."""
        return [float(group["lr"]) for group in self._require_optimizer("get_lr").param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the rate of every param group, until a schedule sets it again."""
        if not lr >= 0:
            raise ValueError(f"lr is {lr}: it must be >= 0")
        for group in self._require_optimizer("set_lr").param_groups:
            group["lr"] = lr

    @property
    def loss_scale(self) -> float:
        """What the next backward pass multiplies the loss by; 1 unless training in fp16."""
        return self.scaler.scale

    @property
    def global_samples(self) -> int:
        """Samples of all ranks seen by the optimizer."""
        return self.global_steps * self.config.train_batch_size

    @property
    def device(self) -> torch.device:
        """Where compute runs, and inputs belong."""
        accelerator = self.runtime.options.accelerator
        return accelerator.device if accelerator is not None else torch.device("cpu")

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine, as torchrun tells it."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        return self.runtime.ranks.rank

    @property
    def world_size(self) -> int:
        return self.runtime.ranks.world_size

    # -- figures ---------------------------------------------------------------------------------------------------------

    def metrics(self) -> StepMetrics:
        """The last step's metrics. Raises RuntimeError before the first step."""
        if self._metrics is None:
            raise RuntimeError("no step was taken yet: metrics() tells about the last step()")
        return self._metrics

    def _note_loss(self, loss: torch.Tensor) -> None:
        if self._monitors or self.config.steps_per_print:
            self._losses.append(loss.detach())

    def _tell(self, rates: list[float], scale: float) -> None:
        """Measure the step, and write and print what the config asks for."""
        outcome = self._require_optimizer("metrics").outcome
        loss = float(torch.stack([one.float() for one in self._losses]).mean()) if self._losses else None
        self._losses.clear()
        metrics = self._metrics = self._meter.take(
            StepFacts(
                step=self.global_steps,
                lr=rates[0] if rates else 0.0,
                loss_scale=scale,
                skipped=outcome.skipped,
                grad_norm=outcome.grad_norm,
                update_s=outcome.update_s,
                commit_s=outcome.commit_s,
                loss=loss,
            )
        )
        if self.global_rank == 0:
            self._monitors.write(metrics, self.global_samples)
            for line in progress_lines(self.config, metrics, skipped_steps=self.skipped_steps, rates=rates):
                print(line, flush=True)

    def write_trace(self, path: str) -> None:
        """Write the Chrome trace (Perfetto) of what ran since tracing was switched on; see ``initialize(trace=True)``."""
        self.runtime.spans.write(path)

    # -- end -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for transfers under way and give back memory, files, locks and threads. The parameters are not usable
        afterwards. Harmless when repeated. Raises what went wrong with the last step's commit, or with a checkpoint saved in the
        background."""
        if self.soundness.closed:
            return
        self.soundness.closed = True
        atexit.unregister(self.close)
        if self._signals is not None:
            self._signals.restore()
        try:
            self.soundness.tell_lost_commit(wait=True)
            self.wait_for_checkpoint()
        finally:
            self._monitors.close()
            self.runtime.close()
            refuse_forward(self.module)

    def _stop(self, save_dir: str | os.PathLike[str] | None) -> None:
        """After a stop signal, between two micro-batches."""
        try:
            if save_dir is not None and not self.soundness.closed and not self.soundness.broken:
                if self._before_draw is not None and self.training_dataloader is not None:
                    self.training_dataloader.load_state_dict(self._before_draw)
                self.save_checkpoint(save_dir)
        finally:
            self.close()

    def __enter__(self) -> "TrainingEngine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_optimizer(self, what: str) -> TieredAdam | ClientOptimizer:
        if self.optimizer is None:
            raise RuntimeError(
                f'{what} needs an optimizer: give one in the config ("optimizer": {{"type": "AdamW", "params": {{"lr": '
                f"1e-4}}}}) or as initialize(optimizer=...)"
            )
        return self.optimizer
