"""What an engine writes and reads: checkpoints to go on from, and whole weights for others."""

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from lamina.zero import ZeroRuntime
from lamina.zero.soundness import Soundness

from .checkpoint.loading import LoadReport, load_checkpoint
from .checkpoint.pending import PendingSave
from .checkpoint.saving import save_checkpoint
from .export import save_pretrained
from .pretrained import load_pretrained

if TYPE_CHECKING:
    from .training import TrainingEngine


class EnginePersistence:
    """Base of the engine: everything that outlives it."""

    module: nn.Module
    runtime: ZeroRuntime
    global_steps: int
    load_report: LoadReport | None
    soundness: Soundness
    _batches: Iterator[Any] | None
    _pending_save: PendingSave | None

    @property
    def _engine(self) -> "TrainingEngine":
        return cast("TrainingEngine", self)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        *,
        keep_last: int | None = None,
        background: bool = False,
    ) -> str:
        """Save everything that training needs to go on, atomically; returns the checkpoint's folder. Collective.

        ``background``: return as soon as training may go on; ``wait_for_checkpoint`` tells when the folder is there. See
        lamina.engine.checkpoint.saving.save_checkpoint.
        """
        self.soundness.refuse("save_checkpoint", uncommitted=True)
        self.wait_for_checkpoint()
        saved = save_checkpoint(
            self._engine,
            save_dir,
            tag=tag,
            client_state=client_state or {},
            save_latest=save_latest,
            keep_last=keep_last,
            background=background,
        )
        if isinstance(saved, str):
            return saved
        self._pending_save = saved
        return saved.path

    def wait_for_checkpoint(self, timeout: float | None = None) -> str | None:
        """Return once the checkpoint that is saved in the background is complete, durable and has its name: its folder; None
        when there is none. Raises what went wrong with it (once), or TimeoutError after ``timeout`` seconds."""
        pending = self._pending_save
        if pending is None:
            return None
        pending.join(timeout)
        self._pending_save = None
        return pending.result()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        strict: bool | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint, whatever placement it was saved with: (its folder, the client state). Collective.

        (None, {}) and a warning when no tag is given and the folder has no ``latest``. See lamina.engine.checkpoint.loading.
        """
        self.soundness.refuse_closed("load_checkpoint")
        self.soundness.tell_lost_commit(wait=True)
        self.wait_for_checkpoint()
        found = load_checkpoint(
            self._engine,
            load_dir,
            tag=tag,
            strict=load_module_strict if strict is None else strict,
            optimizer=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states and not load_module_only,
            module_only=load_module_only,
        )
        if found[0] is not None:
            self.soundness.mended()
            self._batches = None
        return found

    def save_pretrained(
        self,
        save_dir: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
    ) -> str:
        """Whole weights as safetensors, for transformers and anybody else. Collective. See lamina.engine.export."""
        self.soundness.refuse("save_pretrained")
        return save_pretrained(self.module, self.runtime, save_dir, dtype=dtype, max_shard_size=max_shard_size)

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str | None = None) -> bool:
        """DeepSpeed's name for ``save_pretrained`` in the compute dtype; always whole weights, always safetensors."""
        if save_filename is not None and not str(save_filename).endswith(".safetensors"):
            raise ValueError(
                f"save_filename is {save_filename!r}: weights are written as safetensors, name.safetensors"
            )
        self.soundness.refuse("save_16bit_model")
        save_pretrained(self.module, self.runtime, save_dir, max_shard_size=2**63 - 1, filename=save_filename)
        return True

    def load_pretrained(self, load_dir: str | os.PathLike[str], *, strict: bool = True) -> LoadReport:
        """Take weights from safetensors, parameter by parameter; moments and counts stay. See lamina.engine.pretrained."""
        self.soundness.refuse("load_pretrained", uncommitted=True)
        self.load_report = load_pretrained(self.module, self.runtime, load_dir, strict=strict, step=self.global_steps)
        return self.load_report
