"""Run on every rank: ranks that stop to make the same calls; every rank writes the error it got into a file of its own."""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "zero_models"))
from both_ways import built, memory
from odd_models import Stack, tokens

from lamina.engine import building, initialize
from lamina.zero import DivergenceError, Ranks

TIMEOUT = timedelta(seconds=8)


class OtherBranch(Stack):
    """Rank 1 takes another layer."""

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2 + dist.get_rank()](x)


class FewerLayers(Stack):
    """Rank 1 stops early, and then waits."""

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if dist.get_rank() == 1:
                time.sleep(TIMEOUT.total_seconds() + 4)
                raise DivergenceError("rank 1 has left")
        return x


def error_of(build: Callable[[], Any], config: dict[str, Any]) -> str:
    try:
        with initialize(built(build), config=config)[0] as engine:
            engine(*tokens(0))
    except DivergenceError as error:
        return str(error)
    return "none"


def main(case: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    building.Ranks = SimpleNamespace(of_process=lambda device, *_: Ranks.of_process(device, TIMEOUT))
    # A window of a few bytes more than a group: groups are fetched one at a time.
    error = error_of({"branch": OtherBranch, "fewer": FewerLayers}[case], memory(tiers={"device_bytes": 150_000}))
    (folder / str(dist.get_rank())).write_text(error)  # lines that ranks print would run into one another
    os._exit(0)  # the groups are out of step: nobody may wait for them


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
