"""The block `zero_optimization`: the stage and what is offloaded where."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lamina.engine.config.block import AbsolutePath, Block, Names, hint
from lamina.engine.config.quantities import Count, PositiveCount

OffloadDevice = Literal["none", "cpu", "nvme"]


class OffloadParamConfig(Block):
    """Where the parameters lie between uses (stage 3)."""

    device: OffloadDevice = Field(default="none", description="none: device memory, cpu: host memory, nvme: files")
    nvme_path: AbsolutePath | None = Field(
        default=None, description="folder for device nvme; tiers.nvme names it as well"
    )
    pin_memory: bool = hint(
        True, "host memory that takes part in transfers is always page-locked where that is allowed"
    )
    buffer_count: PositiveCount = hint(5, "the number of groups in flight follows from tiers.device_bytes")
    buffer_size: PositiveCount = hint(
        100_000_000, "a parameter of any size is moved in chunks: buffers have no largest parameter"
    )
    max_in_cpu: Count = hint(1_000_000_000, "tiers.host_bytes decides what stays in host memory")


class OffloadOptimizerConfig(Block):
    """Where masters, moments and gradients lie, and that the optimizer runs on the CPU."""

    device: OffloadDevice = Field(default="none", description="none: device memory, cpu: host memory, nvme: files")
    nvme_path: AbsolutePath | None = Field(
        default=None, description="folder for device nvme; tiers.nvme names it as well"
    )
    pin_memory: bool = hint(
        True, "host memory that takes part in transfers is always page-locked where that is allowed"
    )
    buffer_count: PositiveCount = hint(4, "the number of buffers follows from the host budget")
    pipeline_read: bool = hint(False, "the optimizer always reads ahead; the results are the same")
    pipeline_write: bool = hint(False, "the optimizer always writes behind; the results are the same")
    fast_init: bool = hint(False, "state is always initialised by streaming")
    ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="share of the optimizer state that is offloaded; the rest stays in device memory"
    )
    cpuadam_cores_perc: Annotated[float, Field(gt=0, le=1)] = hint(
        0.8, "the optimizer's threads follow from the cores that the process may use"
    )


class LeafModuleConfig(Block):
    """Modules whose parameters are always fetched together, whatever lies inside them (a mixture of experts, say)."""

    classes: Names = Field(default=(), description="class names, bare or with their module's path")
    names: Names = Field(default=(), description="module names as in named_modules()")
    name_suffixes: Names = Field(default=(), description="ends of module names, mlp.experts say")


class ZeroConfig(Block):
    """Partitioning of state over ranks, and offload."""

    stage: Annotated[int, Field(ge=0, le=3)] = Field(
        default=0, description="0: none, 1: optimizer, 2: gradients, 3: parameters"
    )
    offload_param: OffloadParamConfig = OffloadParamConfig()
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    sub_group_size: PositiveCount = Field(
        default=1_000_000_000, description="elements that the optimizer updates at a time"
    )
    reduce_bucket_size: PositiveCount = hint(
        500_000_000, "gradients are reduced group by group; the results are the same"
    )
    allgather_bucket_size: PositiveCount = hint(
        500_000_000, "parameters are gathered group by group; the results are the same"
    )
    stage3_max_live_parameters: Count = hint(
        1_000_000_000, "tiers.device_bytes decides how much is gathered at once; the results are the same"
    )
    stage3_max_reuse_distance: Count = hint(
        1_000_000_000, "groups that are used again soon stay while tiers.device_bytes has room"
    )
    stage3_prefetch_bucket_size: Count = Field(
        default=50_000_000,
        description="0: nothing is fetched ahead; else tiers.lookahead and the budget decide how much",
    )
    stage3_param_persistence_threshold: Count | None = Field(
        default=None,
        description="parameters of up to so many elements stay whole in device memory at stage 3; null: none for their size",
    )
    stage3_model_persistence_threshold: Count = Field(
        default=2**63 - 1, description="elements that stage3_param_persistence_threshold may keep in all"
    )
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    stage3_gather_16bit_weights_on_model_save: bool = hint(
        False, "save_16bit_model() and save_pretrained() always write whole weights"
    )
    overlap_comm: bool | None = hint(None, "transfers and compute always overlap; the results are the same")
    contiguous_gradients: bool = hint(True, "gradients are always contiguous")
    reduce_scatter: bool = hint(True, "gradients are always reduce-scattered from stage 2 on; the results are the same")
    round_robin_gradients: bool = hint(False, "every rank owns a slice of every group: no order to balance")
    ignore_unused_parameters: bool = Field(
        default=True, description="false: a parameter that got no gradient is an error at step()"
    )
