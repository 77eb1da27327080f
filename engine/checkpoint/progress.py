"""How far training is: counts, schedule, loss scale, random states, data position; as JSON values, and put back.

[Note: what a generation knows]
With ``tiers.keep_state`` every commit on NVMe carries this, taken just before the schedule and the loss scale move on;
resuming from the store moves them. A checkpoint is taken between steps and needs no such correction.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lamina.engine.schedule_step import advance_schedule
from lamina.tiers import StoreError

from .plain import decode, encode
from .random_state import random_state, set_random_state

if TYPE_CHECKING:
    from lamina.engine.training import TrainingEngine

_KEY = "engine"


def progress(engine: "TrainingEngine") -> dict[str, Any]:
    """Everything but tensors on tiers and the client's own state. Raises TypeError for a schedule that cannot be kept."""
    optimizer, window, loader = engine.optimizer, engine.window, engine.training_dataloader
    schedule = engine.lr_scheduler
    state: dict[str, Any] = {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": window.micro_steps,
        "in_window": window.in_window,
        "scaler": engine.scaler.state_dict(),
        "schedule": schedule.state_dict() if hasattr(schedule, "state_dict") else None,
        "loader": {**loader.state_dict(), "stride": _stride(engine)} if loader is not None else None,
        "param_groups": _groups(engine) if optimizer is not None else [],
        "param_steps": _steps(engine) if optimizer is not None else {},
    }
    return {key: encode(value, f"{key} state") for key, value in state.items()}


def _stride(engine: "TrainingEngine") -> int:
    """Samples that all ranks take while one rank takes one micro-batch."""
    return engine.config.train_micro_batch_size_per_gpu * engine.runtime.ranks.world_size


def _names(engine: "TrainingEngine") -> dict[int, str]:
    return {
        id(parameter): slot.name
        for segment in engine.runtime.segments
        for slot, parameter in zip(segment.layout.slots, segment.parameters, strict=True)
    }


def _groups(engine: "TrainingEngine") -> list[dict[str, Any]]:
    assert engine.optimizer is not None
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in engine.optimizer.param_groups
    ]


def _steps(engine: "TrainingEngine") -> dict[str, int]:
    assert engine.optimizer is not None
    names = _names(engine)
    return {names[key]: count for key, count in engine.optimizer.param_steps.items()}


def restore_progress(
    engine: "TrainingEngine", state: Mapping[str, Any], *, optimizer: bool = True, schedule: bool = True
) -> None:
    """Put ``progress`` back. ``optimizer``: also rates and step counts; ``schedule``: also the schedule's state.

    Raises ValueError where the engine's own schedule, loss scaler or param groups do not fit.
    """
    held = {key: decode(value) for key, value in state.items()}
    engine.global_steps = int(held["global_steps"])
    engine.skipped_steps = int(held["skipped_steps"])
    engine.window.micro_steps = int(held["micro_steps"])
    engine.window.in_window = int(held["in_window"])
    engine.window.is_scaled = False
    if optimizer:
        engine.scaler.load_state_dict(held["scaler"])
        _restore_optimizer(engine, held)
    if schedule and held["schedule"] is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(held["schedule"])
    if held["loader"] is not None and engine.training_dataloader is not None:
        position = dict(held["loader"])
        # With another number of ranks or size of micro-batches the same samples are another number of batches; where it
        # is not whole, the samples of less than one batch are seen again.
        position["batches"] = position["batches"] * position.pop("stride") // _stride(engine)
        engine.training_dataloader.load_state_dict(position)


def check_progress(engine: "TrainingEngine", state: Mapping[str, Any]) -> None:
    """Raise ValueError, before anything is changed, where ``restore_progress`` would."""
    held = decode(state["param_groups"])
    if engine.optimizer is not None and held and len(held) != len(engine.optimizer.param_groups):
        raise ValueError(
            f"the checkpoint has {len(held)} param groups, and the optimizer has {len(engine.optimizer.param_groups)}: "
            f"make the groups as they were, or load with load_optimizer_states=False"
        )
    kind, mine = decode(state["scaler"])["kind"], engine.scaler.state_dict()["kind"]
    if kind != mine:
        raise ValueError(
            f"the checkpoint has the state of a {kind} loss scale, and the config asks for a {mine} one: set fp16 as it "
            f"was, or load with load_optimizer_states=False"
        )


def _restore_optimizer(engine: "TrainingEngine", held: Mapping[str, Any]) -> None:
    optimizer = engine.optimizer
    if optimizer is None:
        return
    for group, saved in zip(optimizer.param_groups, held["param_groups"], strict=bool(held["param_groups"])):
        group.update(saved)
    names = _names(engine)
    for key in optimizer.param_steps:
        optimizer.param_steps[key] = int(held["param_steps"].get(names[key], optimizer.param_steps[key]))


# -- generations: see [Note: what a generation knows] ------------------------------------------------------------------


def generation_meta(engine: "TrainingEngine") -> dict[str, object]:
    """What a commit remembers: the progress, as it is while the step ends."""
    state = progress(engine)
    # What this step adds to the counts comes after its commit.
    state["global_steps"] = engine.global_steps + 1
    assert engine.optimizer is not None
    return {_KEY: {**state, "random": encode(random_state()), "settled": False}}


def loaded_meta(state: Mapping[str, Any], random: Any) -> dict[str, object]:
    """What a generation remembers that a checkpoint was loaded into; both arguments as they are in the checkpoint."""
    return {_KEY: {**state, "random": random, "settled": True}}


def resume_generation(engine: "TrainingEngine") -> int:
    """Put back what the store's current generation remembers; the step. Raises StoreError when it is not an engine's."""
    store = engine.runtime.store
    current = store.current if store is not None else None
    state = current.meta.get(_KEY) if current is not None else None
    if current is not None and current.step == 0 and state is None:
        return 0  # killed before the first step
    if current is None or not isinstance(state, Mapping):
        raise StoreError("the kept state has no record of the training that wrote it: load a checkpoint instead")
    restore_progress(engine, {key: value for key, value in state.items() if key not in ("random", "settled")})
    if not state["settled"]:
        engine.scaler.update(overflow=False)
        if engine.lr_scheduler is not None:
            advance_schedule(engine.lr_scheduler)
    set_random_state(decode(state["random"]))
    return current.step
