"""A byte-level GPT in plain torch: the model that `lamina train` trains. Nothing in it knows of lamina."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTShape:
    """The numbers that fix a GPT's parameters."""

    layers: int
    dim: int
    """Width of the residual stream. Multiples of 16 keep every parameter's length a multiple of 16."""
    heads: int
    seq: int
    """Longest context in bytes; also the number of learned positions."""
    tied: bool = False
    """Whether the head is the embedding itself, one parameter used twice."""

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "seq"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"--{name} {value}: must be at least 1")
        if self.dim % self.heads:
            near = [h for h in range(1, self.dim + 1) if self.dim % h == 0]
            best = min(near, key=lambda h: abs(h - self.heads))
            raise ValueError(
                f"--dim {self.dim} is not divisible by --heads {self.heads}: use --heads {best}, "
                f"or --dim {-(-self.dim // self.heads) * self.heads}"
            )

    @property
    def num_params(self) -> int:
        """Number of scalar parameters, a tied head counted once."""
        block = 12 * self.dim * self.dim + 4 * self.dim
        tables = (VOCABULARY * (1 if self.tied else 2) + self.seq) * self.dim
        return self.layers * block + tables + 2 * self.dim

    def activation_bytes(self, *, batch: int, itemsize: int) -> int:
        """Bytes that autograd keeps between forward and backward of one micro-batch of `batch` x `seq`.

        Counted from the operations of `GPT.forward` with the CPU's fused attention; tests compare it with
        what autograd really saves. `itemsize` is that of the compute dtype, in bytes.
        """
        tokens = batch * self.seq
        # Per block: inputs and outputs of two norms (4 dim) and their means and deviations (4), qkv (3 dim),
        # attention output (1 dim, its copy for the projection is a view) and its log-sum-exp (fp32 per head),
        # MLP before and after the activation (8 dim).
        block = (16 * self.dim + 4) * itemsize + 4 * self.heads
        # Final norm's input, output and statistics; log-softmax in fp32; tokens and targets.
        tail = (2 * self.dim + 2) * itemsize + 4 * VOCABULARY + 2 * 8
        return tokens * (self.layers * block + tail) + self.seq * 8


PRESETS = {
    "tiny": GPTShape(layers=4, dim=256, heads=4, seq=128),
    "small": GPTShape(layers=8, dim=512, heads=8, seq=256),
    "base": GPTShape(layers=14, dim=768, heads=12, seq=256),
    "large": GPTShape(layers=28, dim=1024, heads=16, seq=256),
}
"""About 3, 25, 100 and 350 million parameters."""


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a four times wider MLP."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.project = nn.Linear(shape.dim, shape.dim, bias=False)
        self.norm_mlp = nn.LayerNorm(shape.dim)
        self.widen = nn.Linear(shape.dim, 4 * shape.dim, bias=False)
        self.narrow = nn.Linear(4 * shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, dim), compute dtype -> the same."""
        batch, seq, dim = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, seq, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attention.transpose(1, 2).reshape(batch, seq, dim))
        y: Tensor = x + self.narrow(F.gelu(self.widen(self.norm_mlp(x))))
        return y


class GPT(nn.Module):
    """Bytes in, next-byte logits or their mean cross-entropy out."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(VOCABULARY, shape.dim)
        self.position = nn.Embedding(shape.seq, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, VOCABULARY, bias=False)
        self.initialize()
        if shape.tied:
            self.head.weight = self.embed.weight

    def initialize(self) -> None:
        """Normal(0, 0.02) weights, the residual branches' outputs narrower with depth.

        A byte's own embedding starts much larger than that of its place, so that the first steps learn which
        byte follows which. A tied head rules this out: each byte's largest logit would be itself.
        """
        residual = 0.02 / (2 * self.shape.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # LayerNorm keeps ones and zeros
            narrow = name.endswith(("project.weight", "narrow.weight"))
            nn.init.normal_(parameter, std=residual if narrow else 0.02)
        if not self.shape.tied:
            nn.init.normal_(self.embed.weight, std=0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens: (batch, seq) int64. Without targets the logits (batch, seq, 256), fp32; with targets of the
        same shape and dtype the mean cross-entropy in nats, 0-dim fp32. ValueError beyond the context.
        """
        seq = tokens.shape[1]
        if seq > self.shape.seq:
            raise ValueError(f"{seq} bytes of context exceed the model's {self.shape.seq}: use --seq {seq}")
        x = self.embed(tokens) + self.position(torch.arange(seq, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
