"""What reads and writes cost each other while both are under way. Seconds; pure."""


def mix_weights(read_s: float, write_s: float, mix_gain: float) -> tuple[float, float]:
    """How much of each of two streams, which would take ``read_s`` and ``write_s`` alone, the time of both together is made of.

    Side by side until the shorter ends: all of the longer counts, and of the shorter what ``mix_gain`` (see Link) leaves.
    """
    shorter = 2 / mix_gain - 1
    return (1.0, shorter) if read_s >= write_s else (shorter, 1.0)


def mixed_seconds(read_s: float, write_s: float, mix_gain: float) -> float:
    """Time of two streams that would take ``read_s`` and ``write_s`` alone: both side by side until the shorter ends."""
    reading, writing = mix_weights(read_s, write_s, mix_gain)
    return reading * read_s + writing * write_s
