"""initialize(): from a module and a config to an engine that trains it."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lamina.aio_native import AsyncIO
from lamina.tiers import Budgets, DiskSpeed, NvmePath, Placement, Spans, Tier, Wishes, probe_disk
from lamina.tiers.gpu import Accelerator
from lamina.zero import AdamDefaults, Ranks, ZeroOptions, ZeroRuntime

from .config import ConfigError, EngineConfig
from .config.optimizer import AdamConfig
from .data import build_dataloader
from .lr_schedules import make_schedule
from .training import TrainingEngine, TrainingPlan

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STATE_PLANE_NAMES = ("remainder", "master", "exp_avg", "exp_avg_sq")


def initialize(
    model: nn.Module,
    model_parameters: Iterable[Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    trace: bool = False,
) -> tuple[TrainingEngine, Any, Any, Any]:
    """Make an engine. Returns (engine, optimizer, dataloader, lr_scheduler); what was not asked for is None.

    ``model_parameters``: parameters or param groups, as for a torch optimizer (default: all that require gradients).
    ``optimizer``: a torch Adam or AdamW whose param groups and hyper-parameters are taken over; else the config's.
    ``lr_scheduler``: a torch scheduler factory taking the optimizer, or the config's ``scheduler`` block.
    ``config``: the path of a JSON file or a mapping in DeepSpeed's dialect. ``trace``: keep spans for ``write_trace``.

    Raises ConfigError (all problems of the config at once), PlacementError (budgets that cannot work, with the sum),
    OSError (paths), TypeError (parameters that cannot be trained). Nothing is left behind when it raises.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}: want a torch.nn.Module")
    if config is None:
        raise ValueError('config is missing: pass the path of a JSON file or a mapping, {"train_batch_size": 8, …}')
    world_size = _world_size()
    settings = EngineConfig.load(config, world_size=world_size, resolve=_model_facts(model))
    adam, params = _adam_of(settings, optimizer, model_parameters, model)
    options = _zero_options(settings, adam, trains=params is not None)
    ranks = Ranks.of_process(options.accelerator.device if options.accelerator is not None else None)
    runtime = ZeroRuntime(model, params, options, ranks=ranks, spans=Spans(enabled=trace))
    try:
        engine = TrainingEngine(
            module=model,
            config=settings,
            runtime=runtime,
            optimizer=runtime.optimizer,
            lr_scheduler=None,
            plan=_plan_text(settings, runtime.placement, runtime),
            disks=_measure_disks(options, runtime),
        )
        engine.lr_scheduler = _scheduler(settings, lr_scheduler, runtime.optimizer)
        loader = None
        if training_data is not None:
            loader = build_dataloader(
                training_data,
                micro_batch_size=settings.train_micro_batch_size_per_gpu,
                rank=ranks.rank,
                world_size=world_size,
                collate_fn=collate_fn,
                drop_last=settings.dataloader_drop_last,
            )
    except BaseException:
        runtime.close()
        raise
    return engine, runtime.optimizer, loader, engine.lr_scheduler


def _world_size() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def _model_facts(model: nn.Module) -> dict[str, Any]:
    """What "auto" may be resolved from."""
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    return {"hidden_size": hidden} if isinstance(hidden, int) else {}


# -- optimizer ---------------------------------------------------------------------------------------------


def _adam_of(
    settings: EngineConfig, optimizer: torch.optim.Optimizer | None, model_parameters: Any, model: nn.Module
) -> tuple[AdamDefaults, Any]:
    """The hyper-parameters and the parameters to train; (defaults, None) when there is no optimizer at all."""
    configured = settings.optimizer
    if optimizer is not None:
        if configured is not None:
            raise ConfigError(
                [
                    (
                        "optimizer",
                        "is given in the config and as initialize(optimizer=...): keep one of the two",
                    )
                ]
            )
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise TypeError(
                f"optimizer is {type(optimizer).__name__}: torch.optim.Adam and AdamW can be taken over; "
                f'other classes are not offered yet, write "optimizer" in the config'
            )
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise ValueError("optimizer: amsgrad=True is not offered: use amsgrad=False")
        if optimizer.state:
            raise ValueError("optimizer has already taken steps: pass a fresh one and load its state afterwards")
        decoupled = isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults.get("decoupled_weight_decay", False)
        kept = ("lr", "betas", "eps", "weight_decay", "maximize")
        groups = [{"params": group["params"], **{key: group[key] for key in kept}} for group in optimizer.param_groups]
        return AdamDefaults(adamw_mode=decoupled), groups
    if configured is None:
        return AdamDefaults(), None
    if not isinstance(configured, AdamConfig):
        raise ConfigError([("optimizer.type", f"{configured.type} is not offered yet: write Adam or AdamW")])
    given = configured.params
    defaults = AdamDefaults(
        lr=given.lr,
        betas=(given.betas[0], given.betas[1]),
        eps=given.eps,
        weight_decay=given.weight_decay,
        adamw_mode=configured.adamw_mode,
        bias_correction=given.bias_correction,
        maximize=given.maximize,
    )
    params = list(model_parameters) if model_parameters is not None else list(model.parameters())
    if params and not isinstance(params[0], dict):
        params = [parameter for parameter in params if parameter.requires_grad]
    if not params:
        raise ValueError("no parameter requires a gradient: unfreeze some, or give no optimizer for forward-only use")
    return defaults, params


def _scheduler(settings: EngineConfig, given: Any, optimizer: Any) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    if settings.scheduler is None or optimizer is None:
        return None
    block = settings.scheduler
    return make_schedule(block.type, block.params.model_dump(), optimizer)


# -- options of the layers below ---------------------------------------------------------------------------


def _zero_options(settings: EngineConfig, adam: AdamDefaults, *, trains: bool) -> ZeroOptions:
    tiers = settings.tiers
    dtype = TORCH_DTYPE[settings.compute_dtype]
    nvme = [NvmePath(path=str(entry.path), bytes=entry.bytes) for entry in settings.nvme_paths]
    with_grad_window = settings.gradient_accumulation_steps > 1 or settings.data_types.grad_accum_dtype is not None
    overlap = _overlap(settings)
    accelerator = _accelerator()
    return ZeroOptions(
        accelerator=accelerator,
        stage=settings.zero_optimization.stage,
        compute_dtype=dtype if settings.compute_dtype != "fp32" else None,
        grad_dtype=TORCH_DTYPE[settings.grad_accum_dtype] if with_grad_window else None,
        budgets=Budgets(device_bytes=tiers.device_bytes, host_bytes=tiers.host_bytes),
        wishes=Wishes(
            param_tiers=_tiers_for(settings, "param", bool(nvme)),
            state_tiers=_state_tiers(settings, bool(nvme), separate=accelerator is not None),
            overlap_update=overlap,
            separate_device=accelerator is not None,
            in_place_tiers=_in_place_tiers(settings, separate=accelerator is not None),
            sub_group_numel=settings.zero_optimization.sub_group_size,
            # Gradients of several micro-batches add up and are kept anyway; else they are given up where memory is short.
            retain_gradients=tiers.host_bytes is None or settings.gradient_accumulation_steps > 1,
        ),
        trains=trains,
        nvme=nvme,
        job=tiers.job,
        generations=tiers.generations,
        verify=tiers.verify,
        keep_state=tiers.keep_state,
        lookahead=64 if tiers.lookahead == "auto" else tiers.lookahead,
        clip_norm=settings.gradient_clipping,
        adam=adam,
        open_io=lambda: AsyncIO(
            backend=tiers.io_backend,
            block_bytes=settings.aio.block_size,
            queue_depth=settings.aio.queue_depth,
        ),
    )


def _overlap(settings: EngineConfig) -> bool:
    """Whether updates may start under the backward pass; asking for it where it cannot be is refused."""
    wanted = settings.tiers.overlap_update
    obstacles = []
    if settings.gradient_clipping > 0:
        obstacles.append("gradient_clipping needs the norm of all gradients first (write 0, or overlap_update: auto)")
    if settings.fp16.enabled:
        obstacles.append("fp16's loss scaler must see all gradients first (use bf16, or overlap_update: auto)")
    if settings.tiers.generations == 1:
        obstacles.append("generations: 1 updates in place, which cannot be undone (write 2)")
    if wanted is True and obstacles:
        raise ConfigError([("tiers.overlap_update", obstacle) for obstacle in obstacles])
    return wanted is not False and not obstacles


def _accelerator() -> Accelerator | None:
    """This rank's GPU, where torch has any; else compute runs on the CPU, in the host's memory."""
    if not torch.cuda.is_available():
        return None
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return Accelerator(device)


def _in_place_tiers(settings: EngineConfig, *, separate: bool) -> tuple[Tier, ...]:
    """Where compute can use parameters as they lie: nowhere when every rank has only a shard of them."""
    if settings.world_size > 1 and settings.zero_optimization.stage == 3:
        return ()
    return (Tier.DEVICE,) if separate else (Tier.DEVICE, Tier.HOST)


def _state_tiers(settings: EngineConfig, has_nvme: bool, *, separate: bool) -> tuple[Tier, ...]:
    """Tiers for optimizer state: the update runs on the CPU, so not in a GPU's memory; the plan shows where it went."""
    tiers = _tiers_for(settings, "exp_avg", has_nvme)
    if not separate:
        return tiers
    return tuple(tier for tier in tiers if tier is not Tier.DEVICE) or (Tier.HOST,)


def _tiers_for(settings: EngineConfig, plane: str, has_nvme: bool) -> tuple[Tier, ...]:
    """Tiers that a plane may live on, fastest first."""
    asked = settings.placement()
    names = STATE_PLANE_NAMES if plane == "exp_avg" else (plane,)
    choices = {repr(asked[name]): asked[name] for name in names}  # type: ignore[index]
    if len(choices) > 1 or any(isinstance(choice, dict) for choice in choices.values()):
        raise ConfigError(
            [
                (
                    "tiers.placement",
                    f'{", ".join(names)} must share one tier, without fractions: write "auto" or one tier for all',
                )
            ]
        )
    (choice,) = choices.values()
    if choice == "auto":
        return (Tier.DEVICE, Tier.HOST, Tier.NVME) if has_nvme else (Tier.DEVICE, Tier.HOST)
    return (Tier(str(choice)),)


# -- disks and the plan ------------------------------------------------------------------------------------------------


def _measure_disks(options: ZeroOptions, runtime: ZeroRuntime) -> list[DiskSpeed]:
    """A short probe of each path, so that the lower bound is known; a path without room for it is left out."""
    if runtime.io is None:
        return []
    disks = []
    for path in options.nvme:
        with contextlib.suppress(OSError):
            disks.append(probe_disk(runtime.io, path.path))
    return disks


def _plan_text(settings: EngineConfig, placement: Placement, runtime: ZeroRuntime) -> TrainingPlan:
    lines = []
    tiers: dict[str, Any] = {}
    for tier, items, budget, arena in (
        (Tier.DEVICE, placement.device_items, settings.tiers.device_bytes, runtime.device),
        (Tier.HOST, placement.host_items, settings.tiers.host_bytes, runtime.host),
        (Tier.NVME, placement.nvme_items, None, None),
    ):
        total = sum(items.values())
        limit = f" of {budget:,}" if budget is not None else ""
        pages = f", {arena.page_kind} pages" if arena is not None and arena.nbytes else ""
        lines.append(f"{tier}: {total:,}{limit} bytes{pages}")
        lines += [f"    {size:>16,}  {name}" for name, size in items.items()]
        tiers[str(tier)] = {"bytes": total, "budget": budget, "items": dict(items)}
    homes: dict[str, dict[str, str]] = {}
    for segment in runtime.segments:
        homes[segment.name] = {"param": str(segment.param_tier), "state": str(segment.state_tier)}
    streamed = sum(1 for segment in runtime.segments if not segment.in_place)
    lines.append(f"{streamed} of {len(homes)} segments are fetched for use, the others are at home in memory")
    lines.append(
        f"updates go through {placement.staging_count} buffers of {placement.sub_group_numel:,} elements"
        if placement.staging_count
        else "updates run in place in memory"
    )
    if runtime.io is not None:
        lines.append(f"I/O backend: {runtime.io.backend}")
    lines.append(
        "updates start under the backward pass" if runtime.early_segments else "updates start after the backward pass"
    )
    lines += list(placement.reasons)
    return TrainingPlan(text="\n".join(lines), placement={"tiers": tiers, "homes": homes})
