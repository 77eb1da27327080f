"""Small agreements between ranks: a text from rank 0, and whether all of them got through."""

import torch

from lamina.zero import Ranks

_TEXT_BYTES = 4096


def text_of_rank0(ranks: Ranks, text: str) -> str:
    """Rank 0's text on every rank. Collective. Raises ValueError for a text of more than 4092 bytes."""
    if ranks.world_size == 1:
        return text
    data = text.encode()
    if len(data) > _TEXT_BYTES - 4:
        raise ValueError(f"a path of {len(data)} bytes is too long")
    buffer = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    packed = len(data).to_bytes(4, "little") + data
    buffer[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    ranks.broadcast(buffer)
    raw = bytes(buffer.numpy().tobytes())
    return raw[4 : 4 + int.from_bytes(raw[:4], "little")].decode()


def any_rank(ranks: Ranks, flag: bool) -> bool:
    """Whether any rank says yes. Collective."""
    return any(ranks.union([flag]))
