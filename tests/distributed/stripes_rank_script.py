"""Run on every rank: the first of rank 1's two disks becomes slow in mid-run; every rank writes its losses and shares."""

import json
import sys
from pathlib import Path

import pytest
from torch import distributed as dist

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "tiers"))
from disk_training import net, on_disks, shares, step, two_disks


def main(folder: Path, factor: float) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = folder / f"disks{rank}"
    own.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        disks = two_disks(own, patch)
        for disk in disks.values():
            disk.write_rate = disk.read_rate  # which reads and which writes a step's figures have is a matter of time
        with on_disks(disks, patch, net()) as engine:
            losses = []
            for number in range(12):
                if rank == 1 and number == 4:
                    next(iter(disks.values())).slow_down(factor)
                losses.append(step(engine, number))
            found = {"losses": losses, "shares": shares(engine)}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
