"""From the config to what the layer below is told: tiers, formats, budgets, and whether updates may start early."""

import os
import stat
from collections.abc import Callable
from typing import Any, Literal

import torch

from lamina.aio_native import AsyncIO
from lamina.tiers import Budgets, NvmePath, Tier, Wishes
from lamina.tiers.memory.gpu import Accelerator
from lamina.tiers.nvme.folder import user_name
from lamina.tiers.placement.homes import Shares
from lamina.zero import ZeroOptions
from lamina.zero.groups.grouping import Grouping, LeafModules

from .config import ConfigError, EngineConfig
from .config.tiers import STATE_PLANES, PlaneName, tier_shares
from .optimizer_choice import OptimizerChoice

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOOKAHEAD_GROUPS = 64
IO_THREADS = 8


def zero_options(
    settings: EngineConfig,
    choice: OptimizerChoice,
    *,
    resume: bool | Literal["auto"] | None = None,
    tell: Callable[[str], None],
) -> ZeroOptions:
    """Raises ConfigError, with every problem, for wishes that exclude each other."""
    problems: list[tuple[str, str]] = []
    tiers = settings.tiers
    nvme = [NvmePath(path=str(entry.path), bytes=entry.bytes) for entry in settings.nvme_paths]
    with_grad_window = settings.gradient_accumulation_steps > 1 or settings.data_types.grad_accum_dtype is not None
    in_memory = choice.client is not None
    accelerator = _accelerator()
    separate = accelerator is not None
    param_tiers, param_shares = _tiers_for(settings, ("param",), bool(nvme), in_memory, problems)
    state_tiers, state_shares = _tiers_for(settings, STATE_PLANES, bool(nvme), in_memory, problems)
    if separate:
        # The update runs on the CPU, so its state is not kept in a GPU's memory; the plan shows where it went.
        state_tiers, state_shares = _off_device(state_tiers, state_shares)
    overlap = _overlap(settings, problems) and not in_memory
    wishes = Wishes(
        param_tiers=param_tiers,
        param_shares=param_shares,
        state_tiers=state_tiers,
        state_shares=state_shares,
        divide_state=not tiers.keep_state,  # a later process finds what is on NVMe, and nothing else
        overlap_update=overlap,
        late_updates=overlap and settings.world_size == 1 and not separate and tiers.verify != "always",
        separate_device=separate,
        saved_input_bytes=(tiers.activation_bytes or 0) if settings.activations in ("host", "nvme") else 0,
        in_place_tiers=_in_place_tiers(settings, separate=separate),
        sub_group_numel=settings.zero_optimization.sub_group_size,
        # Gradients of several micro-batches add up and are kept anyway, those of several ranks may all wait for one that a
        # rank did not use; else they are given up where memory is short.
        retain_gradients=tiers.host_bytes is None
        or settings.gradient_accumulation_steps > 1
        or settings.world_size > 1,
    )
    if problems:
        raise ConfigError(problems)
    dtype = TORCH_DTYPE[settings.compute_dtype]
    leaves = settings.zero_optimization.leaf_module
    return ZeroOptions(
        accelerator=accelerator,
        stage=settings.zero_optimization.stage,
        compute_dtype=dtype if settings.compute_dtype != "fp32" else None,
        grad_dtype=TORCH_DTYPE[settings.grad_accum_dtype] if with_grad_window else None,
        budgets=Budgets(device_bytes=tiers.device_bytes, host_bytes=tiers.host_bytes),
        wishes=wishes,
        trains=choice.params is not None,
        nvme=nvme,
        job=tiers.job,
        generations=tiers.generations,
        verify=tiers.verify,
        keep_state=tiers.keep_state,
        resume=resume,
        client=choice.client,
        persistence_threshold=_persistence_threshold(settings),
        persistent_numel=settings.zero_optimization.stage3_model_persistence_threshold,
        grouping=Grouping(
            leaves=LeafModules(classes=leaves.classes, names=leaves.names, name_suffixes=leaves.name_suffixes)
        ),
        recompute=Tier(settings.activations) if settings.activations != "keep" else None,
        lookahead=_lookahead(settings),
        micro_batches=settings.gradient_accumulation_steps,
        clip_norm=settings.gradient_clipping,
        tell=tell,
        adam=choice.adam,
        open_io=lambda: AsyncIO(
            backend=tiers.io_backend,
            block_bytes=settings.aio.block_size,
            queue_depth=settings.aio.queue_depth,
            max_inflight_bytes=settings.aio.block_size * settings.aio.queue_depth,
            num_threads=max(IO_THREADS, settings.aio.intra_op_parallelism),
        ),
    )


def _persistence_threshold(settings: EngineConfig) -> int:
    """Below stage 3 every rank has all parameters anyway."""
    zero = settings.zero_optimization
    return zero.stage3_param_persistence_threshold or 0 if zero.stage == 3 else 0


def _lookahead(settings: EngineConfig) -> int:
    if settings.zero_optimization.stage3_prefetch_bucket_size == 0:
        return 0
    wanted = settings.tiers.lookahead
    return LOOKAHEAD_GROUPS if wanted == "auto" else wanted


def _overlap(settings: EngineConfig, problems: list[tuple[str, str]]) -> bool:
    """Whether updates may start under the backward pass; asking for it where it cannot be is refused."""
    wanted = settings.tiers.overlap_update
    obstacles = []
    if settings.gradient_clipping > 0:
        obstacles.append("gradient_clipping needs the norm of all gradients first (write 0, or overlap_update: auto)")
    if settings.fp16.enabled:
        obstacles.append("fp16's loss scaler must see all gradients first (use bf16, or overlap_update: auto)")
    if settings.bf16.enabled and settings.bf16.check_grad_overflow:
        obstacles.append("bf16.check_grad_overflow must see all gradients first (write false, or overlap_update: auto)")
    if settings.tiers.generations == 1:
        obstacles.append("generations: 1 updates in place, which cannot be undone (write 2)")
    if wanted is True:
        problems += [("tiers.overlap_update", obstacle) for obstacle in obstacles]
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


def _tiers_for(
    settings: EngineConfig,
    planes: tuple[PlaneName, ...],
    has_nvme: bool,
    in_memory: bool,
    problems: list[tuple[str, str]],
) -> tuple[tuple[Tier, ...], Shares]:
    """Tiers that planes may live on, fastest first, and what each is to hold where shares are given."""
    asked = settings.placement()
    choices = [asked[plane] for plane in planes if plane not in settings.absent_planes]
    shares = next((tier_shares(choice) for choice in choices if choice != "auto"), {})
    if in_memory and "nvme" in shares:
        where = "offload_param" if "param" in planes else "offload_optimizer"
        problems.append(
            (
                f"zero_optimization.{where}.device",
                "is nvme, which is for Adam and AdamW; with another optimizer everything stays in memory: write cpu or none",
            )
        )
        return (Tier.DEVICE, Tier.HOST), ()
    if not shares:
        return (Tier.DEVICE, Tier.HOST, Tier.NVME) if has_nvme and not in_memory else (Tier.DEVICE, Tier.HOST), ()
    found = tuple((Tier(tier), share) for tier, share in shares.items())
    return tuple(tier for tier, _ in found), found if len(found) > 1 else ()


def _off_device(tiers: tuple[Tier, ...], shares: Shares) -> tuple[tuple[Tier, ...], Shares]:
    """The same with host memory in place of a GPU's."""
    given = dict(shares)
    if Tier.DEVICE in given:
        given = {Tier.HOST: given.pop(Tier.DEVICE) + given.pop(Tier.HOST, 0.0)} | given
    others = tuple(given) or tuple(tier for tier in tiers if tier is not Tier.DEVICE)
    return others or (Tier.HOST,), tuple(given.items()) if len(given) > 1 else ()


# -- folders -----------------------------------------------------------------------------------------------------------


def check_paths(settings: EngineConfig) -> None:
    """Raise ConfigError, with every problem, for folders that cannot be used: naming key, path and user.

    Nothing is created: the nearest folder that exists must be one, and be writable.
    """
    problems = []
    for key, path in _named_paths(settings):
        existing = path
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        problem = _problem_of(existing)
        if problem:
            where = path if existing == path else f"{path}: {existing}"
            step = "name a directory that this user can write, or change its owner or mode"
            problems.append((key, f"{where} {problem} (user {user_name()}): {step}"))
    if problems:
        raise ConfigError(problems)


def _named_paths(settings: EngineConfig) -> list[tuple[str, str]]:
    if settings.tiers.nvme:
        return [(f"tiers.nvme[{index}].path", entry.path) for index, entry in enumerate(settings.tiers.nvme)]
    zero: Any = settings.zero_optimization
    found = []
    for name in ("offload_param", "offload_optimizer"):
        block = getattr(zero, name)
        if block.device == "nvme" and block.nvme_path is not None:
            found.append((f"zero_optimization.{name}.nvme_path", block.nvme_path))
    return found


def _problem_of(path: str) -> str | None:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    if not stat.S_ISDIR(mode):
        return "is not a directory"
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        return "cannot be written"
    return None
