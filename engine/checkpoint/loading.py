"""Loads a checkpoint into an engine of any placement, stage, sub-group size and world size."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lamina.tiers import IntegrityError
from lamina.zero.checkpoint.part import load_rank
from lamina.zero.checkpoint.record import RankRecord

from . import folder
from .plain import decode
from .progress import check_progress, loaded_meta, restore_progress
from .random_state import set_random_state
from .saving import persistent_buffers

if TYPE_CHECKING:
    from lamina.engine.training import TrainingEngine


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did. ``missing``: in the model, not in the file; ``unexpected``: the other way round; both keep what
    they had. ``as_saved``: state was taken over as it lay, without a conversion."""

    path: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    as_saved: bool = False


@dataclass(frozen=True, kw_only=True)
class _Read:
    """A checkpoint's JSON."""

    path: str
    main: Mapping[str, Any]
    parts: Sequence[Mapping[str, Any]]
    records: Sequence[RankRecord]

    @property
    def folders(self) -> list[str]:
        return [os.path.join(self.path, f"rank{rank}") for rank in range(len(self.parts))]


def load_checkpoint(
    engine: "TrainingEngine",
    load_dir: str | os.PathLike[str],
    *,
    tag: str | int | None,
    strict: bool = True,
    optimizer: bool = True,
    schedule: bool = True,
    module_only: bool = False,
) -> tuple[str | None, dict[str, Any]]:
    """(folder, client state); (None, {}) and a warning without a tag where there is no ``latest``. Collective.

    Training goes on bit-exactly where it was saved at this world size, whatever the placement; the open accumulation window is
    carried over. ``strict``: parameters that are only here or only there are an error that names them, else they are left
    as they are (``engine.load_report`` lists them). ``optimizer`` false: no moments, step counts, rates, loss scale.
    ``schedule`` false: the schedule keeps its state. ``module_only``: weights and buffers, nothing else.

    Raises FileNotFoundError (tag), DeepSpeedCheckpointError (what DeepSpeed wrote, with the way round), IntegrityError (a
    missing or damaged part, named), KeyError (strict), ValueError (shapes, another number of param groups).
    """
    root = os.path.abspath(os.path.expanduser(os.fspath(load_dir)))
    path = folder.locate(root, tag)
    if path is None:
        warnings.warn(
            f"nothing was loaded, training starts anew: {root} has no file {folder.LATEST!r}; name another folder, or give tag=",
            stacklevel=3,
        )
        return None, {}
    read = _read(path)
    state = read.main["progress"]
    if optimizer:
        check_progress(engine, state)
    buffers = {name: decode(value) for name, value in read.main["buffers"].items()}
    own = persistent_buffers(engine.module)
    lacking, extra = sorted(own.keys() - buffers.keys()), sorted(buffers.keys() - own.keys())
    if strict and (lacking or extra):
        raise KeyError(
            f"buffers not in the checkpoint: {', '.join(lacking) or 'none'}; not in the model: {', '.join(extra) or 'none'} "
            f"(strict=False loads the rest)"
        )
    engine.zero_grad()
    steps = int(state["global_steps"])
    part = read.parts[min(engine.runtime.ranks.rank, len(read.parts) - 1)]
    try:
        loaded = load_rank(
            engine.runtime,
            read.folders,
            read.records,
            step=steps,
            meta=loaded_meta(state, part["random"]),
            strict=strict,
            moments=optimizer,
            gradients=not module_only,
            client_values=_client_values(read, part),
        )
    except (KeyError, ValueError):
        raise  # found before anything was changed
    except BaseException as error:
        engine.soundness.recover("a load", error, frozen_too=True)
        raise
    _load_buffers(engine.module, buffers)
    if not module_only:
        restore_progress(engine, state, optimizer=optimizer, schedule=schedule)
        _restore_rank(engine, read)
    engine.load_report = LoadReport(
        path=path,
        missing=(*loaded.missing, *lacking),
        unexpected=(*loaded.unexpected, *extra),
        as_saved=loaded.as_saved,
    )
    return path, decode(read.main["client_state"])


def _read(path: str) -> _Read:
    """The JSON of all ranks. Raises IntegrityError naming what is missing, damaged or of another version."""
    main_path = os.path.join(path, folder.MAIN_FILE)
    main = folder.read_json(main_path)
    if main.get("format") != folder.FORMAT or main.get("version") != folder.VERSION:
        raise IntegrityError(
            f"{main_path} has format {main.get('format')!r} version {main.get('version')!r}, wanted {folder.FORMAT!r} "
            f"version {folder.VERSION}",
            path=main_path,
        )
    parts, records = [], []
    for rank in range(int(main["world_size"])):
        part_path = os.path.join(path, f"rank{rank}", folder.RANK_FILE)
        part = folder.read_json(part_path)
        try:
            records.append(RankRecord.read(part))
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{part_path} cannot be understood: {error}", path=part_path) from error
        parts.append(part)
    return _Read(path=path, main=main, parts=parts, records=records)


def _client_values(read: _Read, own: Mapping[str, Any]) -> dict[str, Any]:
    """What a client's optimizer keeps besides tensors, of all ranks' parameters; of those cut in two this rank's own part."""
    values: dict[str, Any] = {}
    for part in (*read.parts, own):
        values |= decode(part["client_values"])
    return values


def _restore_rank(engine: "TrainingEngine", read: _Read) -> None:
    """Random states and data position: each rank its own; a rank that there was not goes on from rank 0's position."""
    rank = engine.runtime.ranks.rank
    if len(read.parts) == engine.runtime.ranks.world_size:
        set_random_state(decode(read.parts[rank]["random"]))


def _load_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    own = persistent_buffers(module)
    with torch.no_grad():
        for name, values in buffers.items():
            if name in own:
                if own[name].shape != values.shape:
                    raise ValueError(
                        f"buffer {name} has shape {tuple(own[name].shape)} here and {tuple(values.shape)} there"
                    )
                own[name].copy_(values)
