"""The block `zero_optimization`: the stage and what is offloaded where."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lamina.engine.config.block import AbsolutePath, Block, hint
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
    buffer_count: PositiveCount = Field(
        default=5, description="the least number of parameter groups in flight is taken from here"
    )
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
        default=1.0, description="share of the optimizer state that is offloaded"
    )
    cpuadam_cores_perc: Annotated[float, Field(gt=0, le=1)] = hint(
        0.8, "the optimizer's threads follow from the cores that the process may use"
    )


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
    reduce_bucket_size: PositiveCount = Field(default=500_000_000, description="elements reduced at a time")
    allgather_bucket_size: PositiveCount = Field(default=500_000_000, description="elements gathered at a time")
    stage3_max_live_parameters: Count = Field(default=1_000_000_000, description="elements gathered at once, at most")
    stage3_max_reuse_distance: Count = Field(
        default=1_000_000_000, description="keep a parameter used again within so many elements"
    )
    stage3_prefetch_bucket_size: Count = Field(default=50_000_000, description="elements fetched ahead")
    stage3_param_persistence_threshold: Count = Field(
        default=100_000, description="parameters below are not partitioned"
    )
    stage3_model_persistence_threshold: Count = Field(
        default=2**63 - 1, description="elements kept unpartitioned, in all"
    )
    stage3_gather_16bit_weights_on_model_save: bool = Field(
        default=False, description="gather whole weights when saving"
    )
    overlap_comm: bool | None = hint(None, "transfers and compute always overlap; the results are the same")
    contiguous_gradients: bool = hint(True, "gradients are always contiguous")
    reduce_scatter: bool = hint(True, "gradients are always reduce-scattered from stage 2 on; the results are the same")
    round_robin_gradients: bool = hint(False, "every rank owns a slice of every group: no order to balance")
    ignore_unused_parameters: bool = Field(default=True, description="a parameter without gradient is no error")
