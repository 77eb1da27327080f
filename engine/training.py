"""The training engine: forward, backward, step, and what they cost."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina.tiers import DiskSpeed, Tier
from lamina.zero import TieredAdam, ZeroRuntime

from .config import EngineConfig
from .metrics import StepCosts, StepMetrics, lower_bound


@dataclass(kw_only=True)
class _Clock:
    """Seconds since the last optimizer step, by phase."""

    began: float
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The placement, ready to be printed."""

    text: str
    placement: dict[str, Any]

    def __str__(self) -> str:
        return self.text


class TrainingEngine:
    """Trains one module whose state lies on several tiers. Made by ``initialize``; also a context manager.

    ``engine(batch)`` is the forward pass of one micro-batch, ``backward(loss)`` its backward pass and ``step()`` acts
    at the accumulation boundary only.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        config: EngineConfig,
        runtime: ZeroRuntime,
        optimizer: TieredAdam | None,
        lr_scheduler: Any,
        plan: TrainingPlan,
        disks: list[DiskSpeed],
    ) -> None:
        self.module = module
        self.config = config
        self.plan = plan
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.micro_steps = 0
        self.global_steps = 0
        self.skipped_steps = 0
        self._runtime = runtime
        self._disks = disks
        self._clock = _Clock(began=time.perf_counter())
        self._metrics: StepMetrics | None = None
        self._applied = False
        self._closed = False
        self._io_before = self._io_bytes()
        if optimizer is not None:
            optimizer.generation_meta = self._generation_meta

    # -- the three calls -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on one micro-batch and return what it returns, unscaled."""
        self._refuse_closed("forward")
        began = time.perf_counter()
        with self._runtime.forward_context():
            output = self.module(*args, **kwargs)
        if self.module.training:
            self._clock.forward_s += time.perf_counter() - began
        return output

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> torch.Tensor:
        """Backward pass of one micro-batch; the gradient is the mean over the accumulation window. Returns ``loss``.

        Raises ValueError for a loss that is not a scalar or has no graph.
        """
        self._refuse_closed("backward")
        self._require_optimizer("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"backward wants a scalar loss, got {shape}: reduce it first, loss.mean() say")
        if not loss.requires_grad:
            raise ValueError("the loss has no graph: was it computed under no_grad, or are all parameters frozen?")
        began = time.perf_counter()
        accumulation = self.config.gradient_accumulation_steps
        scaled = loss if accumulation == 1 else loss / accumulation
        last = self.is_gradient_accumulation_boundary() and not retain_graph
        self._runtime.begin_backward(last_of_window=last)
        succeeded = False
        try:
            with self._runtime.forward_context():
                scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            succeeded = True
        finally:
            self._runtime.end_backward(succeeded=succeeded)
        self._clock.backward_s += time.perf_counter() - began
        return loss

    def step(self) -> None:
        """Close the micro-batch; at the accumulation boundary update, commit and step the schedule."""
        self._refuse_closed("step")
        optimizer = self._require_optimizer("step")
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._applied = False
        if not boundary:
            return
        rate = self.get_lr()
        self._runtime.close_window()
        optimizer.finish(step=self.global_steps + 1)
        self._runtime.finish_step()
        self.global_steps += 1
        self._applied = True
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._measure(rate[0] if rate else 0.0)

    def train_batch(self, data_iter: Iterable[Any]) -> torch.Tensor:
        """A whole global batch: ``gradient_accumulation_steps`` micro-batches of ``data_iter``; returns the mean loss.

        Each item is a tuple or list (positional arguments), a mapping (keyword arguments), or one argument; the module
        returns the loss, or a tuple, mapping or object whose ``loss`` or first item it is.
        """
        batches: Iterator[Any] = iter(data_iter)
        losses = []
        for _ in range(self.config.gradient_accumulation_steps):
            loss = _loss_of(self._call_with(next(batches)))
            self.backward(loss)
            self.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def eval_batch(self, data_iter: Iterable[Any]) -> torch.Tensor:
        """Mean loss over ``gradient_accumulation_steps`` micro-batches, without gradients and in eval mode."""
        was_training = self.module.training
        self.module.eval()
        try:
            batches = iter(data_iter)
            with torch.no_grad():
                losses = [
                    _loss_of(self._call_with(next(batches))) for _ in range(self.config.gradient_accumulation_steps)
                ]
        finally:
            self.module.train(was_training)
        return torch.stack(losses).mean()

    def _call_with(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return self(**batch)
        return self(*batch) if isinstance(batch, tuple | list) else self(batch)

    # -- state that users ask for --------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> "TrainingEngine":
        self.module.train(mode)
        return self

    def eval(self) -> "TrainingEngine":
        return self.train(False)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step()`` updates."""
        return (self.micro_steps + 1) % self.config.gradient_accumulation_steps == 0

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` changed the parameters."""
        return self._applied

    def get_global_grad_norm(self) -> float:
        """Norm of the last applied gradient before clipping."""
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
        return 1.0

    def metrics(self) -> StepMetrics:
        """The last step's metrics. Raises RuntimeError before the first step."""
        if self._metrics is None:
            raise RuntimeError("no step was taken yet: metrics() tells about the last step()")
        return self._metrics

    # -- metrics ---------------------------------------------------------------------------------------------------------

    def _io_bytes(self) -> tuple[int, int]:
        """Bytes read and written so far by this process's I/O."""
        if self._runtime.io is None:
            return 0, 0
        stats = self._runtime.io.stats()
        return stats.bytes_read, stats.bytes_written

    def _measure(self, lr: float) -> None:
        runtime = self._runtime
        now = time.perf_counter()
        clock, self._clock = self._clock, _Clock(began=now)
        step_s = now - clock.began
        read_before, written_before = self._io_before
        read, written = self._io_before = self._io_bytes()
        read_bytes, written_bytes = read - read_before, written - written_before
        fetches, update = runtime.executor.take_counters(), runtime.updater.take_counters()
        outcome = self._require_optimizer("metrics").outcome
        barrier = not runtime.early_segments
        fetched = fetches.fetched_bytes
        costs = StepCosts(
            compute_s=max(0.0, clock.forward_s + clock.backward_s - fetches.stalled_s),
            adam_s=update.adam_s,
            forward_backward_io_s=self._io_seconds(fetched, 0),
            update_io_s=self._io_seconds(max(0, read_bytes - fetched), written_bytes),
        )
        links = {"nvme->host": read_bytes, "host->nvme": written_bytes} if runtime.store else {}
        self._metrics = StepMetrics(
            step=self.global_steps,
            step_s=step_s,
            forward_s=clock.forward_s,
            backward_s=clock.backward_s,
            update_s=outcome.update_s,
            commit_s=outcome.commit_s,
            communication_share=runtime.ranks.take_seconds() / step_s,
            stalled_s={"nvme->host": fetches.stalled_s} if runtime.store else {},
            link_bytes=links,
            link_gbps={link: nbytes / step_s / 1e9 for link, nbytes in links.items()},
            peak_bytes={
                str(Tier.DEVICE): runtime.device.peak,
                str(Tier.HOST): runtime.host.peak,
                str(Tier.NVME): runtime.placement.nvme_bytes,
            },
            nvme_written_bytes=written,
            lower_bound_s=lower_bound(costs, barrier=barrier, shared_cores=True),
            grad_norm=outcome.grad_norm,
            lr=lr,
        )
        if self.config.steps_per_print and self.global_steps % self.config.steps_per_print == 0:
            print(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={lr:.6g}, step_s={step_s:.3f}",
                flush=True,
            )

    def _io_seconds(self, read_bytes: int, written_bytes: int) -> float:
        """Time of these bytes on the disks: bytes are striped evenly, so the disks share them."""
        if not self._disks:
            return 0.0
        share = 1 / len(self._disks)
        return max(disk.seconds(int(read_bytes * share), int(written_bytes * share)) for disk in self._disks)

    def _generation_meta(self) -> dict[str, object]:
        return {"global_steps": self.global_steps + 1, "micro_steps": self.micro_steps}

    # -- end -----------------------------------------------------------------------------------------------------------

    def write_trace(self, path: str) -> None:
        """Write the Chrome trace (Perfetto) of what ran since tracing was switched on; see ``initialize(trace=True)``."""
        self._runtime.spans.write(path)

    def close(self) -> None:
        """Wait for transfers under way and give back memory, files, locks and threads. The parameters are not usable
        afterwards. Harmless when repeated."""
        if not self._closed:
            self._closed = True
            self._runtime.close()

    def __enter__(self) -> "TrainingEngine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}: the engine was closed")

    def _require_optimizer(self, what: str) -> TieredAdam:
        if self.optimizer is None:
            raise RuntimeError(
                f'{what} needs an optimizer: give one in the config ("optimizer": {{"type": "AdamW", "params": {{"lr": '
                f"1e-4}}}}) or as initialize(optimizer=...)"
            )
        return self.optimizer


def _loss_of(output: Any) -> torch.Tensor:
    """The loss in what a module returned."""
    loss = output
    if isinstance(output, dict):
        loss = output.get("loss")
    elif isinstance(output, tuple | list):
        loss = output[0]
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"train_batch found no loss in {type(output).__name__}: return the loss, or a tuple that starts with it"
        )
    return loss
