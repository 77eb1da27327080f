"""Text from a byte-level model, one byte at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

PAD_TO = 64
"""Lengths are padded to multiples of this: the math library keeps code and memory for every shape that it meets."""


class NotFiniteError(ArithmeticError):
    """The model gives no chances to draw from: its training diverged."""


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt: bytes,
    *,
    count: int,
    seq: int,
    seed: int,
    temperature: float,
    on_byte: Callable[[], None] = lambda: None,
) -> bytes:
    """`count` bytes that follow `prompt` (at least one byte, of which the last `seq` are seen).

    logits_of: (1, length) int64 -> (1, length, 256) float, length at most `seq`; a causal model, for which bytes
    after the last are padding. `temperature` 0 takes the likeliest byte. `on_byte` is called before each one and
    may raise. Same arguments, same bytes. ValueError for an empty prompt, NotFiniteError for logits that are not finite.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one byte")
    draw = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    for _ in range(count):
        on_byte()
        seen = text[-seq:]
        padded = min(seq, -(-len(seen) // PAD_TO) * PAD_TO)
        tokens = torch.tensor([[*seen, *bytes(padded - len(seen))]], dtype=torch.int64)
        logits = logits_of(tokens)[0, len(seen) - 1].float().cpu()
        if not logits.isfinite().all():
            raise NotFiniteError("the model's outputs are not finite")
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            # The likeliest byte at 0, in float64: however small the temperature, no quotient is infinite or 0 / 0.
            above = (logits - logits.max()).double() / temperature
            chances = torch.softmax(above, dim=0).float()
            chosen = int(torch.multinomial(chances, 1, generator=draw))
        text.append(chosen)
    return bytes(text[len(prompt) :])


def printable(text: bytes) -> str:
    """Bytes as text that is safe on a terminal: what is not printable, a newline or a tab becomes a dot."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{MIDDLE DOT}"
        for char in text.decode("utf-8", errors="replace")
    )
