"""Saves a checkpoint: every rank its part, rank 0 what concerns all, and then the folder gets its name."""

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lamina.zero import ClientOptimizer
from lamina.zero.checkpoint.part import CapturedState, capture_rank

from . import folder
from .pending import PendingSave
from .plain import encode
from .progress import progress
from .random_state import random_state
from .together import any_rank, text_of_rank0

if TYPE_CHECKING:
    from lamina.engine.training import TrainingEngine


def save_checkpoint(
    engine: "TrainingEngine",
    save_dir: str | os.PathLike[str],
    *,
    tag: str | int | None,
    client_state: Mapping[str, Any],
    save_latest: bool = True,
    keep_last: int | None = None,
    background: bool = False,
) -> str | PendingSave:
    """Save to ``save_dir/tag`` (default: global_step<n>) and return that path. Collective; durable when it returns.

    ``background``: return a PendingSave as soon as training may go on. State in memory is written by then; what waits for the
    disk (and the copy of NVMe-resident state to another file system, through a few buffers) follows in a thread, and the
    checkpoint gets its name, and ``latest``, when all of it is durable on every rank.

    A crash at any moment leaves the checkpoints that were there, and ``latest`` names a complete one. A tag that is
    there is replaced. An open accumulation window is saved with its gradients. ``client_state`` may hold None, numbers,
    strings, bytes, tensors, and lists, tuples, sets and dicts of them. ``keep_last``: remove older checkpoints beyond so many.

    Raises TypeError (client state), ValueError (an empty folder; a tag, or ranks that pass different ones), RuntimeError between
    ``backward()`` and ``step()``, OSError and StoreError (disk); nothing is left behind then.
    """
    if engine.window.is_scaled:
        raise RuntimeError("save_checkpoint between backward() and step(): call it after step()")
    ranks = engine.runtime.ranks
    name = folder.checked_tag(tag if tag is not None else f"global_step{engine.global_steps}")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}: want at least 1")
    if not os.fspath(save_dir):
        raise ValueError('save_dir is empty: give the folder for checkpoints ("." for the current one)')
    held = encode(dict(client_state), "client_state")
    state = progress(engine)
    root = os.path.abspath(os.path.expanduser(os.fspath(save_dir)))
    try:
        common = text_of_rank0(ranks, name)
        differs = any_rank(ranks, common != name)
    except RuntimeError as late:
        late.add_note("save_checkpoint is collective: every rank must call it, with the same tag")
        raise
    if differs:
        raise ValueError(f"ranks pass different tags: {name!r} here, {common!r} on rank 0. All must pass the same")
    partial = text_of_rank0(ranks, folder.begin(root, name) if ranks.rank == 0 else "")
    error: BaseException | None = None
    save: PendingSave | None = None
    try:
        captured = _capture_part(engine, partial)
        save = PendingSave(
            root=root,
            tag=name,
            partial=partial,
            rank=ranks.rank,
            world_size=ranks.world_size,
            captured=captured,
            latest=save_latest,
            keep_last=keep_last,
        )
        if ranks.rank == 0:
            main = {
                "format": folder.FORMAT,
                "version": folder.VERSION,
                "world_size": ranks.world_size,
                "saved_at": time.time(),
                "global_steps": engine.global_steps,
                "progress": state,
                "client_state": held,
                "buffers": _buffers(engine.module),
            }
            folder.write_json(os.path.join(partial, folder.MAIN_FILE), main)
        if not background:
            save.complete_part()
    except BaseException as caught:  # noqa: BLE001 - raised again, after the other ranks know
        error = caught
    failed = any_rank(ranks, error is not None)
    path = os.path.join(root, name)
    if background and save is not None and not failed:
        save.start()
        return save
    if not failed and ranks.rank == 0 and save is not None:
        try:
            save.finish()
        except BaseException as caught:  # noqa: BLE001 - raised again, after the other ranks know
            error = caught
    failed = any_rank(ranks, error is not None) or failed
    if failed:
        if save is not None:
            save.captured.drain()
        any_rank(ranks, failed)  # nobody writes there any more
        if ranks.rank == 0:
            folder.abandon(partial)
        if error is not None:
            raise error
        raise RuntimeError(f"another rank could not save its part of {path}: its error is told there")
    return path


def _capture_part(engine: "TrainingEngine", partial: str) -> CapturedState:
    part = os.path.join(partial, f"rank{engine.runtime.ranks.rank}")
    os.mkdir(part, 0o700)
    captured = capture_rank(engine.runtime, part)
    try:
        optimizer = engine.optimizer
        values = optimizer.state_values() if isinstance(optimizer, ClientOptimizer) else {}
        content = {
            **captured.record.as_dict(),
            "random": encode(random_state()),
            "client_values": encode(values, "optimizer state"),
        }
        folder.write_json(os.path.join(part, folder.RANK_FILE), content)
    except BaseException:
        captured.drain()
        raise
    return captured


def _buffers(module: nn.Module) -> dict[str, Any]:
    """Persistent buffers (running means, say) by name; they are small."""
    return {name: encode(buffer) for name, buffer in persistent_buffers(module).items()}


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Those that a state dict has."""
    found = {}
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
