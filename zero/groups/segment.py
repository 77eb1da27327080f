"""A segment: the parameters of a group that share a dtype and are all trained or all frozen, as one flat shard."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lamina.tiers import Block, Plane, PlaneSpec, ShardSpec, Tier
from lamina.tiers.memory.gpu import Accelerator
from lamina.zero.adam.dtypes import CLIENT_PLANES, STATE_PLANES

from .memory import tensor_over
from .partition import FlatLayout


@dataclass(kw_only=True, eq=False)
class Segment:
    """Flat layout, parameters in slot order, and the tiers that are home to them.

    ``flat`` is the tensor over the whole unsharded layout while it is in memory. ``home`` holds the parameters where their
    tier is memory: the whole layout when they are ``replicated``, else this rank's shard. ``in_place``: compute uses
    ``home`` itself. ``persistent``: compute always can, on every rank and stage. ``state`` holds a block per plane where
    the optimizer state is in memory: of the whole shard, or, with the others' state on NVMe, of the ``kept`` elements at its
    front, of which the store then has nothing. ``late``: see [Note: late updates] in update.py.

    With an accelerator the device tier is its memory, which the update on the CPU cannot reach. Parameters at home there
    are ``device_home``, and the update works on a copy: a plane of ``state``, or what it reads from NVMe.
    """

    name: str
    group: int
    layout: FlatLayout
    parameters: Sequence[nn.Parameter]
    dtype: torch.dtype
    trainable: bool
    rank: int = 0
    block: bool = True
    client: bool = False  # an optimizer of torch keeps the state
    param_tier: Tier = Tier.DEVICE
    state_tier: Tier = Tier.HOST
    kept: int = 0
    kept_on: Tier = Tier.HOST
    late: bool = False
    device: Accelerator | None = None
    in_place: bool = True
    replicated: bool = True
    persistent: bool = False
    flat: torch.Tensor | None = None
    placeholder: torch.Tensor | None = None  # the one NaN behind all of the parameters while they are not bound
    home: Block | None = None
    device_home: Block | None = None
    state: dict[Plane, Block] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole unsharded flat layout."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        if self.trainable:
            return (CLIENT_PLANES if self.client else STATE_PLANES)[self.dtype]
        return (PlaneSpec(plane=Plane.PARAM, itemsize=self.dtype.itemsize),)

    def has_plane(self, plane: Plane) -> bool:
        return any(spec.plane is plane for spec in self.planes)

    @property
    def stored_planes(self) -> tuple[PlaneSpec, ...]:
        """The planes kept on NVMe. With the optimizer state there, ``param`` is too, so that a generation is whole."""
        if self.trainable and self.state_tier is Tier.NVME:
            return self.planes
        if self.param_tier is Tier.NVME:
            return tuple(spec for spec in self.planes if spec.plane is Plane.PARAM)
        return ()

    @property
    def numel_in_place(self) -> int:
        """Elements at the front of this rank's shard that an update changes where they lie; the others pass through buffers."""
        return self.kept if self.stored_planes else self.layout.shard_numel

    def shard_spec(self) -> ShardSpec:
        """This rank's shard as the store knows it, which holds none of the ``kept`` elements."""
        return ShardSpec(
            name=self.name,
            numel=self.layout.shard_numel,
            planes=self.stored_planes,
            frozen=not self.trainable,
        )

    @torch.inference_mode(mode=False)
    def bind(self, block: Block, byte_offset: int) -> None:
        """Point the parameters into the block, which holds the whole flat layout from ``byte_offset`` on."""
        self.flat = tensor_over(block, self.dtype, self.layout.numel, byte_offset, device=self.device)
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.data = self.flat[slot.offset : slot.end].view(slot.shape)
        self._refuse_lost_edit()

    @torch.inference_mode(mode=False)
    def unbind(self) -> None:
        """Leave placeholders of the right shape behind. They hold NaN, so that a use is never a wrong number."""
        self.flat = None
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device.device if self.device else None)
        self.placeholder = nan
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.data = nan.expand(slot.shape)

    def _refuse_lost_edit(self) -> None:
        """Torch refuses most writes into a placeholder, but not those into one of a single element or through an index."""
        nan, self.placeholder = self.placeholder, None
        if nan is not None and not torch.isnan(nan):
            names = ", ".join(slot.name for slot in self.layout.slots)
            raise RuntimeError(
                f"{names}: one of these was changed while its values were elsewhere, so the change is not kept: write "
                f"lamina.zero.set_full(parameter, 'param', values), or change it inside GatheredParameters(…, modifier_rank=0)"
            )

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor over the flat layout."""
        begin, end = self.layout.shard_range(self.rank)
        return flat[begin:end]

    @property
    def updated_where_used(self) -> bool:
        """Whether an update changes memory that compute uses."""
        return self.home is not None or self.device_home is not None

    @property
    def copy_renewable(self) -> bool:
        """Whether an update can write into a fetched copy: it reaches the memory, and has the parameters in a buffer.

        Not where an optimizer of torch makes the update, or it comes late, not on an accelerator, and not where the parameters,
        or some of them, are at home in host memory, from where a copy costs no read.
        """
        reached = self.device is None and not self.client and not self.kept and not self.late
        return reached and not self.in_place and self.param_tier is Tier.NVME

    @property
    def home_offset(self) -> int:
        """Byte offset of this rank's shard in ``home``."""
        return self.layout.shard_range(self.rank)[0] * self.dtype.itemsize if self.replicated else 0

    @property
    def shard_nbytes(self) -> int:
        return self.layout.shard_numel * self.dtype.itemsize

    def home_shard(self) -> memoryview:
        """This rank's shard where the parameters are at home in memory. Raises RuntimeError where they are not."""
        if self.home is None:
            raise RuntimeError(f"{self.name} is not at home in memory")
        return self.home.view[self.home_offset : self.home_offset + self.shard_nbytes]

    def address(self, plane: Plane) -> int:
        """Address of this rank's shard of a plane that is in memory, or of what is kept of it; 0 when it is not."""
        if plane is Plane.PARAM and self.home is not None:
            return self.home.address + self.home_offset
        block = self.state.get(plane)
        return block.address if block is not None else 0
