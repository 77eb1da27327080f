"""Bytes of activations of one rank, item by item."""

from dataclasses import dataclass

from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.state_bytes import PAGE_BYTES, align_up
from lamina.engine.planner.workload import Attention, Workload

_STATISTIC_BYTES = 4  # mean, rstd and log-sum-exp are kept in fp32


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """What autograd keeps on one rank for one micro-batch."""

    input: int
    """Input of one block."""
    block: int
    """All that one block keeps for its backward pass."""
    saved: int
    """Kept over the whole forward pass: every block's activations, or the checkpoints."""
    working: int
    """With checkpointing: the blocks between two checkpoints, computed again in the backward pass; else 0."""
    logits: int
    """Logits, log-probabilities and their gradients at the turn from forward to backward."""
    tail: int
    """Input and output of the last norm."""
    gradient: int
    """Gradients of activations alive in the backward pass of one block, beyond what is kept."""

    @property
    def peak(self) -> int:
        """The largest sum that is alive at once: at the loss, or inside of the last block's backward pass."""
        return self.saved + max(self.tail + self.logits, self.working + self.gradient)


def block_activation_bytes(model: ModelShape, load: Workload, *, tensor: int = 1) -> int:
    """Bytes that one block's forward pass keeps.

    Per token, in elements: two norm inputs and two norm outputs, query, key, value, attention output, and
    in the feed-forward part what enters and leaves the activation function (16 * hidden for a GPT). Plain
    attention adds the scores and the probabilities: 2 * heads * sequence. With tensor parallelism the inner
    widths are divided.
    """
    h = model.hidden
    ffn_elements = (4 if model.gated else 2) * model.ffn_width
    if model.experts:
        ffn_elements = ffn_elements * model.experts_active + h * model.experts_active
    inner = 2 * model.query_width + 2 * model.kv_width + ffn_elements
    if load.attention is Attention.PLAIN:
        inner += 2 * model.heads * load.sequence
    statistics = 2 * 2 + (model.heads // tensor if load.attention is Attention.FLASH else 0)
    return load.tokens * ((4 * h + -(-inner // tensor)) * load.itemsize + statistics * _STATISTIC_BYTES)


def logits_bytes(model: ModelShape, load: Workload, *, tensor: int = 1) -> int:
    """Bytes around the loss: logits, log-probabilities and the gradient of the logits.

    In half precision with an fp32 loss: 2 (logits) + 4 (raised) + 4 (log-probabilities) + 4 (gradient);
    otherwise three times the compute dtype.
    """
    raised = load.itemsize == 2 and load.logits_fp32
    per_element = 2 + 4 + 4 + 4 if raised else 3 * load.itemsize
    return load.tokens * -(-model.vocab // tensor) * per_element


def activation_bytes(
    model: ModelShape, load: Workload, *, layers: int | None = None, tensor: int = 1, in_flight: int = 1
) -> ActivationBytes:
    """Activations of one rank that runs ``layers`` blocks (all by default).

    ``in_flight``: micro-batches whose activations are alive at once (pipeline stages in 1F1B).
    """
    depth = model.layers if layers is None else layers
    block = block_activation_bytes(model, load, tensor=tensor)
    stream = load.tokens * model.hidden * load.itemsize
    if load.checkpoint_interval:
        kept = -(-depth // load.checkpoint_interval)
        saved, working = align_up(stream, PAGE_BYTES) * kept, block * min(load.checkpoint_interval, depth)
    else:
        saved, working = block * depth, 0
    widest = max(model.ffn_width * (2 if model.gated else 1) // tensor, model.hidden)
    return ActivationBytes(
        input=align_up(stream, PAGE_BYTES),
        block=block,
        saved=saved * in_flight,
        working=working,
        logits=logits_bytes(model, load, tensor=tensor),
        tail=2 * stream,
        gradient=load.tokens * (widest + model.hidden) * load.itemsize,
    )
