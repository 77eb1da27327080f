"""initialize(): from a module and a config to an engine that trains it."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn

from lamina.tiers import Spans
from lamina.zero import Ranks, ZeroRuntime
from lamina.zero.checkpoint.target import refresh_homes
from lamina.zero.passes.closed_forward import allow_forward, refuse_forward
from lamina.zero.whole_state_dict import guard_state_dict

from .arguments import config_of, join_ranks, place_among_ranks, refuse_arguments
from .checkpoint.progress import resume_generation
from .config import ConfigError, EngineConfig
from .data import ResumableLoader, build_dataloader
from .loss_scale import DynamicLossScaler, LossScaler, ScalePolicy, StaticLossScaler
from .lr_schedules import make_schedule
from .monitors import open_monitors
from .optimizer_choice import choose_optimizer
from .plan_text import TrainingPlan
from .training import TrainingEngine
from .usable_module import require_usable
from .zero_options import check_paths, zero_options

NOTHING_TO_RECOMPUTE = (
    "wants blocks to be computed again, but the model has none: no ModuleList or Sequential whose children have parameters, or "
    "only such with running statistics (batch norm). Write keep, and call engine.checkpoint() in the model"
)


def initialize(
    model: nn.Module | None = None,
    model_parameters: Iterable[Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | EngineConfig | None = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    resume: bool | Literal["auto"] | None = None,
    save_on_stop: str | os.PathLike[str] | None = None,
    handle_signals: bool = True,
    trace: bool = False,
    args: Any = None,
    config_params: Any = None,
    dist_init_required: bool | None = None,
    timeout_s: float | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    mesh_param: Any = None,
) -> tuple[TrainingEngine, Any, Any, Any]:
    """Make an engine. Returns (engine, optimizer, dataloader, lr_scheduler); what was not asked for is None.

    ``model_parameters``: parameters or param groups, as for a torch optimizer (default: all that require gradients).
    ``optimizer``: a torch optimizer, or a callable that makes one from param groups; else the config's. Adam and AdamW are
    taken over (groups, rates) and run on any tier; others run as they are where all state stays in memory.
    ``lr_scheduler``: a torch scheduler, or a callable that makes one from the optimizer; else the config's.
    ``config``: the path of a JSON file or a mapping in DeepSpeed's dialect; ``config_params`` and ``args.deepspeed_config``
    are DeepSpeed's other ways to name it.
    ``training_data``: a dataset; ``seed`` shuffles it.
    ``resume``: with ``tiers.keep_state``, go on from the last committed generation that the job's folders hold, after a kill
    at any moment, say (True: it must be there; "auto": else start anew; False: start anew, dropping it; None: start anew,
    but refuse to drop one). All optimizer state must be on nvme.
    ``save_on_stop``: save a checkpoint there when SIGINT or SIGTERM ends training; ``handle_signals``: see
    [Note: stop signals]. ``trace``: keep spans for ``write_trace``.
    ``dist_init_required``: None joins the ranks that torchrun started, if nobody has. ``timeout_s``: how long a rank waits for
    the others before that is an error (None: as long as torch.distributed's default group).

    Raises ConfigError (all problems of the config at once), PlacementError (budgets that cannot work, with the sum),
    StoreError (folders), TypeError (parameters that cannot be trained), ValueError (parameters without values, or of
    another engine). Nothing is left behind when it raises.
    """
    if not isinstance(model, nn.Module):
        hint = "; DeepSpeed's first argument is passed as args=" if hasattr(model, "__dict__") else ""
        raise TypeError(f"model is {type(model).__name__}: want a torch.nn.Module{hint}")
    refuse_arguments(mpu=mpu, mesh_param=mesh_param)
    source = config_of(config, config_params, args)
    join_ranks(dist_init_required, distributed_port)
    rank, world_size = place_among_ranks()
    settings = EngineConfig.load(source, world_size=world_size, resolve=_model_facts(model))
    require_usable(model)
    allow_forward(model)
    choice = choose_optimizer(settings, optimizer, model_parameters, model)
    options = zero_options(settings, choice, resume=resume, tell=_tell if rank == 0 else _keep_quiet)
    check_paths(settings)
    with contextlib.ExitStack() as undo:
        monitors = open_monitors(settings, rank=rank)
        undo.callback(monitors.close)
        device = options.accelerator.device if options.accelerator is not None else None
        ranks = Ranks.of_process(device, timedelta(seconds=timeout_s) if timeout_s is not None else None)
        undo.callback(refuse_forward, model)
        runtime = ZeroRuntime(model, choice.params, options, ranks=ranks, spans=Spans(enabled=trace))
        undo.callback(runtime.close)
        if settings.tiers.activations in ("device", "host", "nvme") and not runtime.recomputed:
            raise ConfigError([("tiers.activations", NOTHING_TO_RECOMPUTE)])
        _warn_of_unknown_state(settings, runtime)
        guard_state_dict(model)
        loader = _loader(settings, training_data, ranks, collate_fn, seed)
        engine = TrainingEngine(
            module=model,
            config=settings,
            runtime=runtime,
            scaler=_scaler(settings),
            plan=TrainingPlan(settings, runtime),
            monitors=monitors,
            training_dataloader=loader,
            save_on_stop=save_on_stop,
            handle_signals=handle_signals,
        )
        undo.callback(engine.close)
        engine.lr_scheduler = _scheduler(settings, lr_scheduler, choice.client or runtime.optimizer)
        if runtime.resumed:
            refresh_homes(runtime)
            resume_generation(engine)
        if settings.dump_state and ranks.rank == 0:
            print(f"{settings.describe()}\n{engine.plan}", flush=True)
        undo.pop_all()
    return engine, choice.client or runtime.optimizer, loader, engine.lr_scheduler


def _tell(sentence: str) -> None:
    """On stderr, where it is in nobody's way."""
    print(f"lamina: {sentence}", file=sys.stderr, flush=True)


def _keep_quiet(sentence: str) -> None:
    """Other ranks have the same to say."""


def _warn_of_unknown_state(settings: EngineConfig, runtime: ZeroRuntime) -> None:
    if runtime.residence.own_state.unknown and settings.tiers.host_bytes is not None:
        warnings.warn(
            f"tiers.host_bytes does not cover what the optimizer keeps for itself, which cannot be found out beforehand: "
            f"{runtime.residence.own_state.unknown}. Leave room for it beside the budget",
            stacklevel=3,
        )


def _model_facts(model: nn.Module) -> dict[str, Any]:
    """What "auto" may be resolved from."""
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    return {"hidden_size": hidden} if isinstance(hidden, int) else {}


def _scaler(settings: EngineConfig) -> LossScaler:
    fp16 = settings.fp16
    if not fp16.enabled:
        return StaticLossScaler()
    if fp16.loss_scale:
        return StaticLossScaler(fp16.loss_scale)
    return DynamicLossScaler(
        ScalePolicy(
            initial_scale=2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            min_scale=fp16.min_loss_scale,
        )
    )


def _scheduler(settings: EngineConfig, given: Any, optimizer: Any) -> Any:
    if given is not None:
        if settings.scheduler is not None:
            raise ConfigError(
                [("scheduler", "is given in the config and as initialize(lr_scheduler=...): keep one of the two")]
            )
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    if settings.scheduler is None or optimizer is None:
        return None
    block = settings.scheduler
    return make_schedule(block.type, block.params.model_dump(), optimizer)


def _loader(
    settings: EngineConfig, data: Any, ranks: Ranks, collate_fn: Callable[[list[Any]], Any] | None, seed: int
) -> ResumableLoader | None:
    if data is None:
        return None
    return build_dataloader(
        data,
        micro_batch_size=settings.train_micro_batch_size_per_gpu,
        rank=ranks.rank,
        world_size=ranks.world_size,
        collate_fn=collate_fn,
        drop_last=settings.dataloader_drop_last,
        seed=seed,
    )
