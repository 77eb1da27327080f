"""Small shards and states for the tests of the generation store."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import Plane, PlaneSpec, ShardSpec

CHUNK = 4096
PLANES = (
    PlaneSpec(plane=Plane.PARAM, itemsize=2),
    PlaneSpec(plane=Plane.EXP_AVG, itemsize=4),
)
SHARDS = tuple(
    ShardSpec(name=f"block{index}", numel=numel, planes=PLANES)
    for index, numel in enumerate([1, 1000, 4097, 20_011, 0])
)
FROZEN = ShardSpec(name="embedding", numel=3333, planes=PLANES[:1], frozen=True)

State = dict[tuple[str, Plane], bytes]


def random_state(shards: Sequence[ShardSpec] = SHARDS) -> State:
    """Random bytes for every plane."""
    return {(s.name, p.plane): os.urandom(s.numel * p.itemsize) for s in shards for p in s.planes}


def write_all(store: GenerationStore, state: State, step: int, **options: Any) -> None:
    """Commit a whole state."""
    with store.begin() as transaction:
        for (shard, plane), data in state.items():
            transaction.write(shard, plane, data)
        transaction.commit(step, **options)


def read_all(store: GenerationStore) -> State:
    """The current state."""
    state: State = {}
    for shard in store.shards:
        for spec in shard.planes:
            buffer = bytearray(shard.numel * spec.itemsize)
            store.read(shard.name, spec.plane, buffer).wait()
            state[shard.name, spec.plane] = bytes(buffer)
    return state


def rank_folder(tmp_path: Path) -> Path:
    """Where open_store's default keeps its files."""
    return tmp_path / "nvme" / "job" / "rank0"
