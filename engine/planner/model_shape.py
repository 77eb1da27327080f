"""The shape of a transformer, and how many parameters each of its groups has."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.formed_groups import FormedGroups

MOST_LAYERS = 10_000
MOST = 1 << 31
_SIZES = ("hidden", "heads", "vocab", "kv_heads", "head_dim", "ffn", "positions", "experts", "experts_active")


@dataclass(frozen=True, kw_only=True)
class LoraShape:
    """Low-rank adapters: everything else is frozen."""

    rank: int
    targets: tuple[str, ...] = ("attention",)
    """Which matrices of a block get adapters: ``attention`` (q, k, v, o), ``mlp``, or single names such as
    ``q``."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise PlanError(f"lora rank: {self.rank} must be at least 1")
        known = {"attention", "mlp", "q", "k", "v", "o", "up", "gate", "down"}
        unknown = ", ".join(name for name in self.targets if name not in known)
        if unknown or not self.targets:
            raise PlanError(f"lora targets: {unknown or 'none given'}; write some of {', '.join(sorted(known))}")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder or encoder made of equal blocks between an embedding and a head.

    ``inventory`` (block sizes measured from a file or a module) overrides the counts that follow from the
    shape.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    """Key and value heads; 0 means as many as ``heads``."""
    head_dim: int = 0
    """Width of one head; 0 means hidden / heads."""
    ffn: int = 0
    """Width of the feed-forward layer; 0 means 4 * hidden."""
    vocab: int = 50257
    positions: int = 0
    """Rows of a learned position table; 0 for rotary, ALiBi or none."""
    gated: bool = False
    """Gate and up projection instead of one (SwiGLU and kin)."""
    bias: bool = True
    """Biases on all linear layers."""
    qkv_bias: bool | None = None
    """Biases on q, k, v; None means as ``bias``."""
    norm_bias: bool = True
    """LayerNorm (weight and bias) instead of RMSNorm (weight)."""
    norms_per_layer: int = 2
    qk_norm: bool = False
    final_norm: bool = True
    tied: bool = True
    """The head shares the embedding."""
    head_bias: bool = False
    """The head has a bias; where it shares the embedding, both are used at the same time."""
    experts: int = 0
    """Experts per block; 0 for a dense model."""
    experts_active: int = 0
    """Experts that one token passes through."""
    dense_layers: int = 0
    """Blocks without experts, in a model that has some."""
    root_extra: int = 0
    """Further parameters outside of the blocks (a pooler, token types, position offsets)."""
    head_extra: int = 0
    """Further parameters of the head (its own transform and bias)."""
    lora: LoraShape | None = None
    trainable: int | None = None
    """Trainable parameters when it is neither all nor LoRA."""
    inventory: "ParamInventory | None" = None
    notes: tuple[str, ...] = field(default=())
    """What was guessed while reading the input."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab"):
            if getattr(self, name) < 1:
                raise PlanError(f"model {self.name}: {name} is {getattr(self, name)}; it must be at least 1")
        for name in _SIZES[3:]:
            if getattr(self, name) < 0:
                raise PlanError(f"model {self.name}: {name} is {getattr(self, name)}; it must not be negative")
        for name in ("layers", *_SIZES):
            if getattr(self, name) > (most := MOST_LAYERS if name == "layers" else MOST):
                raise PlanError(
                    f"model {self.name}: {name} is {getattr(self, name):,}; no more than {most:,} are planned"
                )
        widest = max(max(size) for size in self.matrices().values())
        if self.lora is not None and self.lora.rank > widest:
            raise PlanError(
                f"model {self.name}: lora rank {self.lora.rank:,} is larger than its matrices: {widest:,} at most"
            )
        if not self.head_dim and self.hidden % self.heads:
            raise PlanError(
                f"model {self.name}: hidden {self.hidden} is no multiple of heads {self.heads}; give head_dim"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise PlanError(f"model {self.name}: heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.experts and not 0 < self.experts_active <= self.experts:
            raise PlanError(f"model {self.name}: experts_active {self.experts_active} must lie in 1..{self.experts}")
        if self.trainable is not None and not 0 <= self.trainable <= self.total_params:
            raise PlanError(f"model {self.name}: trainable {self.trainable} must lie in 0..{self.total_params}")

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Elements of all query heads of one token."""
        return self.head_width * self.heads

    @property
    def kv_width(self) -> int:
        """Elements of all key (or value) heads of one token."""
        return self.head_width * (self.kv_heads or self.heads)

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer (of one expert)."""
        return self.ffn or 4 * self.hidden

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the linear layers of one block, one expert's where there are several."""
        h, f = self.hidden, self.ffn_width
        sizes = {
            "q": (h, self.query_width),
            "k": (h, self.kv_width),
            "v": (h, self.kv_width),
            "o": (self.query_width, h),
            "up": (h, f),
            "down": (f, h),
        }
        if self.gated:
            sizes["gate"] = (h, f)
        return sizes

    def _linear(self, name: str, size: tuple[int, int]) -> int:
        with_bias = self.bias
        if name in ("q", "k", "v") and self.qkv_bias is not None:
            with_bias = self.qkv_bias
        return size[0] * size[1] + (size[1] if with_bias else 0)

    def _block(self, experts: int) -> int:
        sizes = self.matrices()
        attention = sum(self._linear(name, sizes[name]) for name in ("q", "k", "v", "o"))
        expert = sum(self._linear(name, size) for name, size in sizes.items() if name in ("up", "down", "gate"))
        router = self.hidden * self.experts
        norms = self.norms_per_layer * self.hidden * (2 if self.norm_bias else 1)
        norms += 2 * self.head_width if self.qk_norm else 0
        return attention + expert * max(experts, 1) + router + norms

    @property
    def block_params(self) -> int:
        """Parameters of one block (all experts), adapters left out."""
        return self._block(self.experts)

    @property
    def embedding_params(self) -> int:
        """Token and position tables and what else lies outside of blocks and head."""
        return (self.vocab + self.positions) * self.hidden + self.root_extra

    @property
    def head_params(self) -> int:
        """Final norm and, when it is not tied, the output matrix."""
        norm = self.hidden * (2 if self.norm_bias else 1) if self.final_norm else 0
        return norm + self.head_extra + self._head_matrix + (self.vocab if self.head_bias else 0)

    @property
    def _head_matrix(self) -> int:
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def lora_params(self) -> int:
        """Parameters of the adapters of one block: rank * (in + out) for every adapted matrix."""
        if self.lora is None:
            return 0
        names = {"attention": ("q", "k", "v", "o"), "mlp": ("up", "gate", "down")}
        wanted = {name for target in self.lora.targets for name in names.get(target, (target,))}
        copies = max(self.experts, 1)
        return sum(
            self.lora.rank * sum(size) * (copies if name in ("up", "gate", "down") else 1)
            for name, size in self.matrices().items()
            if name in wanted
        )

    @cached_property
    def params(self) -> "ParamInventory":
        """Parameters by group."""
        if self.inventory is not None:
            return self.inventory
        block = self.block_params + self.lora_params
        largest = max(self.vocab * self.hidden, *(a * b for a, b in self.matrices().values()))
        table = self.vocab * self.hidden
        head = 0 if self.tied else table + (self.vocab if self.head_bias else 0)
        return ParamInventory(
            before=(table, self.positions * self.hidden, self.root_extra),
            blocks=(block,) * self.layers,
            after=(self.head_params - head, head),
            largest_param=largest,
        )

    @property
    def total_params(self) -> int:
        """All parameters, adapters included, tied ones once."""
        return self.params.total

    @property
    def trainable_params(self) -> int:
        """Parameters that the optimizer updates."""
        if self.lora is not None:
            return self.lora_params * self.layers
        return self.total_params if self.trainable is None else self.trainable

    @property
    def active_params(self) -> int:
        """Parameters that one token passes through: fewer than all in a mixture of experts."""
        if not self.experts:
            return self.total_params + self._used_again
        expert = sum(self._linear(n, s) for n, s in self.matrices().items() if n in ("up", "down", "gate"))
        return self.total_params - (self.layers - self.dense_layers) * (self.experts - self.experts_active) * expert

    @property
    def _used_again(self) -> int:
        """Parameters of blocks that are used several times, for every time but the first."""
        blocks = self.params.blocks
        return max(self.layers - len(blocks), 0) * sum(blocks) // max(len(blocks), 1)

    def with_layers(self, layers: int) -> "ModelShape":
        """The same model with another depth."""
        return replace(self, layers=layers, inventory=None, name=f"{self.name} with {layers} layers")


@dataclass(frozen=True, kw_only=True)
class ParamInventory:
    """Numbers of parameters in execution order."""

    before: tuple[int, ...]
    """Of each module before the blocks: tables of tokens and positions."""
    blocks: tuple[int, ...]
    after: tuple[int, ...]
    """Of each module after the blocks: the last norm, an output matrix that is not tied."""
    largest_param: int
    """Elements of the largest single tensor."""
    formed: FormedGroups | None = None
    """The groups that the engine forms, where there is a module to tell."""

    @property
    def embedding(self) -> int:
        """All before the blocks."""
        return sum(self.before)

    @property
    def head(self) -> int:
        """All after the blocks."""
        return sum(self.after)

    @cached_property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + sum(self.blocks) + self.head
