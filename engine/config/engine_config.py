"""EngineConfig: the whole config, checked and with every default filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from lamina.engine.config.activation import ActivationCheckpointingConfig
from lamina.engine.config.aio import AioConfig
from lamina.engine.config.block import Block
from lamina.engine.config.checks import check_all
from lamina.engine.config.describe import describe
from lamina.engine.config.errors import ConfigError, in_file_order
from lamina.engine.config.monitor import CsvMonitorConfig, JsonMonitorConfig, TensorBoardConfig
from lamina.engine.config.optimizer import AdamConfig, TorchOptimizerConfig
from lamina.engine.config.precision import Bf16Config, DataTypesConfig, DTypeName, Fp16Config
from lamina.engine.config.quantities import PositiveCount
from lamina.engine.config.reader import read
from lamina.engine.config.scheduler import SchedulerConfig
from lamina.engine.config.schema import complete_schema
from lamina.engine.config.source import Source, scan_source
from lamina.engine.config.table import known_keys
from lamina.engine.config.tiers import PLANES, NvmePathConfig, PlaneChoice, PlaneName, TierName, TiersConfig
from lamina.engine.config.zero import ZeroConfig


def _never(value: Any) -> Any:
    """Wrappers write infinity for "no progress lines"."""
    return None if value == math.inf else value


_TIER_OF_DEVICE: Mapping[str, TierName] = {"none": "device", "cpu": "host", "nvme": "nvme"}


class EngineConfig(Block):
    """A config that can be used: made by `load()`, which checks everything. Frozen."""

    train_batch_size: PositiveCount = Field(default=1, description="samples of one optimizer step over all ranks")
    train_micro_batch_size_per_gpu: PositiveCount = Field(
        default=1, description="samples of one forward pass on one rank"
    )
    gradient_accumulation_steps: PositiveCount = Field(default=1, description="micro-batches of one optimizer step")
    gradient_clipping: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="largest global norm; 0: no clipping"
    )
    steps_per_print: Annotated[PositiveCount | None, BeforeValidator(_never)] = Field(
        default=None, description="optimizer steps between progress lines; null: none"
    )
    wall_clock_breakdown: bool = Field(
        default=False, description="print how the time of a step splits beside the progress lines"
    )
    memory_breakdown: bool = Field(default=False, description="print the bytes of each tier beside the progress lines")
    dump_state: bool = Field(default=False, description="print the effective config at initialize")
    dataloader_drop_last: bool = Field(default=False, description="drop an incomplete last batch")
    communication_data_type: DTypeName | None = Field(
        default=None,
        description="number format of gradient reduction; only that of the gradients themselves is offered",
    )
    zero_allow_untested_optimizer: bool = Field(
        default=False, description="take an optimizer whose class is not torch's"
    )
    optimizer: AdamConfig | TorchOptimizerConfig | None = Field(
        default=None, description="the optimizer, when none is passed"
    )
    scheduler: SchedulerConfig | None = Field(
        default=None, description="the learning-rate schedule, when none is passed"
    )
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    data_types: DataTypesConfig = DataTypesConfig()
    zero_optimization: ZeroConfig = ZeroConfig()
    aio: AioConfig = AioConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    json_monitor: JsonMonitorConfig = JsonMonitorConfig()
    tiers: TiersConfig = TiersConfig()

    _world_size: int = PrivateAttr(1)
    _hints: tuple[str, ...] = PrivateAttr(())
    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _source: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(
        cls, source: Source | EngineConfig, *, world_size: int = 1, resolve: Mapping[str, Any] | None = None
    ) -> EngineConfig:
        """Read, resolve and check a config.

        `source` is the path of a JSON file, a mapping, or a config, which is read anew for another `world_size`,
        the number of data-parallel ranks. `resolve` says what "auto" may become (see auto.py).

        Raises ConfigError with every problem.
        """
        if isinstance(source, EngineConfig):
            if source.world_size == world_size and not resolve:
                return source
            source = source._source
        scanned = scan_source(source)
        given = scanned.given
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            message = f"want a whole number of at least 1, got {world_size!r}"
            raise ConfigError([("world_size", message)], source=scanned.name)
        reading, config = read(cls, given, resolve or {})
        for path, message in scanned.problems:
            reading.fault(path, message)
        config = check_all(reading, config, world_size)
        if reading.problems:
            raise ConfigError(in_file_order(reading.problems, given), source=scanned.name)
        config._source = _with_absolute_paths(given, config)
        config._world_size = world_size
        config._hints = tuple(reading.hints)
        config._origins = MappingProxyType(reading.origins)
        return config

    @property
    def world_size(self) -> int:
        """Data-parallel ranks that the batch arithmetic was done for."""
        return self._world_size

    @property
    def hints(self) -> tuple[str, ...]:
        """Warnings: keys that were accepted and change nothing here, one sentence each with the path."""
        return self._hints

    @property
    def compute_dtype(self) -> DTypeName:
        """Number format of forward and backward."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def absent_planes(self) -> frozenset[PlaneName]:
        """Planes that training in this number format does not have."""
        absent: dict[DTypeName, frozenset[PlaneName]] = {
            "fp32": frozenset({"remainder", "master"}),
            "bf16": frozenset({"master"}),
            "fp16": frozenset({"remainder"}),
        }
        return absent[self.compute_dtype]

    @property
    def grad_accum_dtype(self) -> DTypeName:
        """Number format in which gradients wait for the step."""
        if self.data_types.grad_accum_dtype is not None:
            return self.data_types.grad_accum_dtype
        return self.compute_dtype if self.gradient_accumulation_steps == 1 else "fp32"

    @property
    def nvme_paths(self) -> tuple[NvmePathConfig, ...]:
        """Folders for NVMe-resident state: those of `tiers.nvme`, else `nvme_path` of offload blocks on nvme.

        Absolute; the parser does not look at the disk.
        """
        if self.tiers.nvme:
            return self.tiers.nvme
        zero = self.zero_optimization
        blocks = (zero.offload_param, zero.offload_optimizer)
        paths = [block.nvme_path for block in blocks if block.device == "nvme" and block.nvme_path is not None]
        return tuple(NvmePathConfig(path=path) for path in dict.fromkeys(paths))

    @property
    def activations(self) -> Literal["keep", "device", "host", "nvme"]:
        """Where the inputs of blocks wait that are computed again in the backward pass; "keep": none are."""
        wanted = self.tiers.activations
        if wanted != "auto":
            return wanted
        return "host" if self.activation_checkpointing.cpu_checkpointing else "keep"

    def placement(self) -> dict[PlaneName, Literal["auto"] | PlaneChoice]:
        """For each plane the tier that was asked for, shares of tiers, or "auto": the planner's to choose.

        `tiers.placement` decides where it names a plane; then an offload block that was given; what neither
        mentions is "auto" where the config has a `tiers` block, else device memory.
        """
        given = self.tiers.placement if isinstance(self.tiers.placement, dict) else {}
        return {plane: given[plane] if plane in given else self._offloaded(plane) for plane in PLANES}

    def _offloaded(self, plane: PlaneName) -> Literal["auto"] | PlaneChoice:
        """Where the offload blocks and the stage put a plane that `tiers.placement` does not name."""
        zero = self.zero_optimization
        block = zero.offload_param if plane == "param" else zero.offload_optimizer
        if "device" not in block.model_fields_set:
            # A stage that was asked for bounds what may move; without one the placement is free.
            free = "stage" not in zero.model_fields_set or zero.stage >= (3 if plane == "param" else 1)
            return "auto" if free and "tiers" in self.model_fields_set else "device"
        tier = _TIER_OF_DEVICE[block.device]
        if plane in ("param", "grad") or tier == "device" or zero.offload_optimizer.ratio == 1:
            # Gradients wait in host memory and go further only when the host budget cannot hold them.
            return "host" if plane == "grad" and tier == "nvme" else tier
        return {tier: zero.offload_optimizer.ratio, "device": 1 - zero.offload_optimizer.ratio}

    def effective(self) -> dict[str, Any]:
        """Everything resolved, as plain JSON values in the dialect's keys."""
        return self.model_dump(mode="json")

    def describe(self) -> str:
        """The effective config, one key a line with the origin of its value, then the warnings."""
        return describe(self.effective(), self._origins, self._hints, self._world_size)

    def __str__(self) -> str:
        return self.describe()

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """A JSON schema of the config, for editors."""
        return complete_schema(cls.model_json_schema(), known_keys(cls))


def _with_absolute_paths(given: Mapping[str, Any], config: EngineConfig) -> dict[str, Any]:
    """`given` with the paths that `config` made of it, so that reading it anew elsewhere names the same folders."""
    source = dict(given)
    zero = given.get("zero_optimization")
    if isinstance(zero, dict):
        source["zero_optimization"] = zero = dict(zero)
        for name in ("offload_param", "offload_optimizer"):
            block = zero.get(name)
            if isinstance(block, dict) and block.get("nvme_path") not in (None, "auto"):
                zero[name] = {**block, "nvme_path": getattr(config.zero_optimization, name).nvme_path}
    tiers = given.get("tiers")
    if isinstance(tiers, dict) and "nvme" in tiers:
        source["tiers"] = {**tiers, "nvme": [entry.model_dump() for entry in config.tiers.nvme]}
    return source
