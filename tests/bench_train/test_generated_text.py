"""Generation byte by byte, and text that a terminal can take."""

import pytest
import torch

from lamina.bench.generate import NotFiniteError, generate, printable


def likes(next_byte: dict[int, int]):  # type: ignore[no-untyped-def]
    """A model whose likeliest next byte follows from the last one; keeps the lengths that it saw."""

    class Model:
        def __init__(self) -> None:
            self.lengths: list[int] = []

        def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
            self.lengths.append(tokens.shape[1])
            logits = torch.zeros(1, tokens.shape[1], 256)
            for place, byte in enumerate(tokens[0].tolist()):
                logits[0, place, next_byte.get(byte, 0)] = 3.0
            return logits

    return Model()


CYCLE = {ord("a"): ord("b"), ord("b"): ord("c"), ord("c"): ord("a")}


def test_greedy_follows_the_likeliest_byte_within_the_context() -> None:
    model = likes(CYCLE)
    assert generate(model, b"ca", count=5, seq=3, seed=1, temperature=0) == b"bcabc"
    assert model.lengths == [3, 3, 3, 3, 3]


def test_a_growing_text_meets_few_shapes() -> None:
    model = likes(CYCLE)
    assert generate(model, b"a", count=200, seq=150, seed=1, temperature=0) == (b"bca" * 67)[:200]
    assert sorted(set(model.lengths)) == [64, 128, 150]


def test_a_seed_fixes_what_is_drawn_and_low_temperatures_approach_greedy() -> None:
    flat = likes(dict.fromkeys(range(256), 65))
    drawn = [generate(flat, b"x", count=40, seq=8, seed=seed, temperature=1.0) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert generate(flat, b"x", count=40, seq=8, seed=1, temperature=0.1) == b"A" * 40


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-46, 1e-38])
def test_the_least_temperatures_are_greedy(temperature: float) -> None:
    assert generate(likes(CYCLE), b"a", count=6, seq=8, seed=1, temperature=temperature) == b"bcabca"


def test_nothing_to_start_from_is_refused_and_a_stop_gets_through() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(likes(CYCLE), b"", count=1, seq=4, seed=1, temperature=0)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(likes(CYCLE), b"a", count=1, seq=4, seed=1, temperature=0, on_byte=stop)


def test_no_control_character_reaches_the_terminal() -> None:
    text = printable("é\x1b[31m\x00\r\n\tx\u202e".encode() + b"\xff")
    assert text == "é·[31m··\n\tx·\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    def model(tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(1, tokens.shape[1], 256)
        logits[:, :, 7] = bad
        return logits

    with pytest.raises(NotFiniteError, match="not finite"):
        generate(model, b"a", count=1, seq=8, seed=1, temperature=temperature)
