"""Manifests with a right checksum and any content: a clear error or the right state, and no foreign file touched."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from store_samples import CHUNK, FROZEN, SHARDS, State, random_state, read_all, write_all

from lamina.aio_native import AsyncIO, crc32c
from lamina.tiers.errors import StoreError
from lamina.tiers.nvme.pinned_reader import PinnedReader
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import NvmePath

ALL = (*SHARDS, FROZEN)
Json = Any
Place = tuple[str | int, ...]

NASTY = st.sampled_from(
    [
        None, True, 0, 1, -1, 2**31, 2**63, 10**40, 0.5, "", "..", "/", "gen-0", "gen-1", "gen-2", "frozen", "frozen-1",
        "../../foreign", "gen-0/../../../foreign", "/etc/passwd", "lock", "manifest.json", "gen-0\0", [], {}, [[]], [0],
        [1], [1, 1], [0, 1], [255, 1], [1] * 300, [0] * 300, [10**9], ["gen-0"], {"stem": "gen-0", "counts": [1]},
        {"stem": "../x", "counts": [1]},
    ]
)  # fmt: skip


def signed(data: Json) -> bytes:
    """As a manifest is written: the shards last, then the checksum of everything before."""
    body = json.dumps({key: value for key, value in data.items() if key != "crc32c"}, indent=1)[:-2]
    return f'{body},\n "crc32c": "{crc32c(body.encode()):08x}"\n}}\n'.encode()


def places(data: Json, at: Place = ()) -> list[Place]:
    """Every member and item, however deep."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in inside for place in [(*at, key), *places(value, (*at, key))]]


def parent(data: Json, place: Place) -> Json:
    for key in place[:-1]:
        data = data[key]
    return data


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[float, str, Json]]:
    kinds = st.sampled_from(["replace", "remove", "double", "swap"])
    return draw(st.lists(st.tuples(st.floats(0, 0.999), kinds, NASTY), min_size=1, max_size=3))


def mutated(data: Json, changes: list[tuple[float, str, Json]]) -> Json:
    data = copy.deepcopy(data)
    for share, kind, value in changes:
        found = places(data)
        place = found[int(share * len(found))]
        holder, key = parent(data, place), place[-1]
        if kind == "replace":
            holder[key] = copy.deepcopy(value)
        elif kind == "remove":
            del holder[key]
        elif kind == "double" and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif kind == "swap" and isinstance(holder, dict):
            other = sorted(holder)[int(share * len(holder))]
            holder[key], holder[other] = holder[other], holder[key]
    return data


class Sample:
    """A store with two steps, a checkpoint and foreign files beside, to be set up again in no time."""

    def __init__(self, root: Path, io: AsyncIO) -> None:
        self.root, self.io = root, io
        self.state: State = random_state(ALL)
        with self.open() as store:
            write_all(store, self.state, 0)
            new = random_state()
            write_all(store, new, 1, meta={"lr": 0.1})
            self.state = self.state | new
            store.pin(str(root / "live" / "ckpt"))
        for place in ("foreign", "live/foreign", "live/a/foreign", "live/a/job/foreign", "live/a/job/rank0/foreign"):
            (root / place).write_text("not ours")
        (root / "live/a/job/rank0/gen-0.bin.bak").write_text("not ours")
        shutil.copytree(root / "live", root / "kept")
        self.foreign = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - self.ours()

    def ours(self) -> set[str]:
        names = ("manifest.json", "lock", "gen-", "frozen")
        files = [path for path in (self.root / "live").rglob("*") if path.is_file()]
        return {str(path.relative_to(self.root)) for path in files if path.name.startswith(names)} - {
            "live/a/job/rank0/gen-0.bin.bak"
        }

    def open(self) -> GenerationStore:
        paths = [NvmePath(path=str(self.root / "live" / name)) for name in "ab"]
        return GenerationStore.open(paths, job="job", rank=0, shards=ALL, io=self.io, chunk_bytes=CHUNK)

    def reset(self) -> None:
        shutil.rmtree(self.root / "live")
        shutil.copytree(self.root / "kept", self.root / "live")

    def untouched(self) -> bool:
        return all((self.root / name).exists() for name in self.foreign) and (
            (self.root / "foreign").read_text() == "not ours"
        )


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory, io: AsyncIO) -> Sample:
    return Sample(tmp_path_factory.mktemp("fuzz"), io)


RETIRED_CURRENT = [(0.0, "retire", None)]


@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=mutations())
@example(changes=RETIRED_CURRENT)
def test_any_manifest_of_a_store(sample: Sample, changes: list[tuple[float, str, Json]]) -> None:
    sample.reset()
    path = sample.root / "live" / "a" / "job" / "rank0" / "manifest.json"
    good = json.loads(path.read_bytes())
    data = mutated(good, changes)
    if changes == RETIRED_CURRENT:  # the current generation among what may be removed
        data["retired"] = copy.deepcopy(good["slots"])
    path.write_bytes(signed(data))
    before = {name: os.stat(sample.root / name).st_mtime_ns for name in sample.foreign}
    try:
        store = sample.open()
    except StoreError as error:
        assert len(str(error)) > 20  # noqa: PT017 - any of the store's own errors is an answer
        path.write_bytes(signed(good))
        with sample.open() as store:  # a refusal has not harmed what is there
            assert read_all(store) == sample.state
    else:
        with store:
            if store.current is not None and store._pool.manifest.frozen is not None:
                assert read_all(store) == sample.state
    assert sample.untouched()
    assert before == {name: os.stat(sample.root / name).st_mtime_ns for name in sample.foreign}


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=mutations())
def test_any_manifest_of_a_checkpoint(sample: Sample, changes: list[tuple[float, str, Json]]) -> None:
    sample.reset()
    path = sample.root / "live" / "ckpt" / "manifest.json"
    path.write_bytes(signed(mutated(json.loads(path.read_bytes()), changes)))
    try:
        with PinnedReader(str(path.parent), sample.io) as reader:
            reader.sums(check=True)
            for shard in reader.shards:
                for spec in shard.planes:
                    if not shard.frozen or reader.frozen is not None:
                        buffer = bytearray(shard.plane_bytes(spec.plane))
                        reader.read(shard.name, spec.plane, buffer).wait()
    except StoreError as error:
        assert len(str(error)) > 20  # noqa: PT017 - any of the store's own errors is an answer
    assert sample.untouched()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"shards": ' * 5_000, "null", "[]", '"x"', "1" * 5000])
def test_json_that_is_no_manifest(tmp_path: Path, io: AsyncIO, text: str) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    body = text.encode()
    (folder / "manifest.json").write_bytes(body + f',\n "crc32c": "{crc32c(body):08x}"\n}}\n'.encode())
    with pytest.raises(StoreError, match="not a manifest"):
        PinnedReader(str(folder), io)
