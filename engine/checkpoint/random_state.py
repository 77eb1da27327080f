"""The states of the random generators: torch's (CPU and the current GPU), Python's and NumPy's."""

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch


def random_state() -> dict[str, Any]:
    """All states, for ``plain.encode``."""
    legacy: Any = numpy.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = legacy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(name), keys.tobytes(), int(position), int(has_gauss), float(gauss)),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on from ``state``. A state of a GPU is left out where there is none."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
