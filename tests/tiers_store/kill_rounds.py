"""Kill an updating child at random moments and check what a reopening finds.

Run as: python kill_rounds.py FOLDER ROUNDS SEED GENERATIONS PATHS LONGEST_S [pin]. Prints one JSON line. A zygote process
forks one child per round (so that a round does not pay for an interpreter's start), kills it after a random time (in every
other round counted from its first commit, however slow the machine is) and forks another child that reopens the store and
compares every byte with what the step that it found must hold.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

from lamina.aio_native import AsyncIO, BufferedIOWarning
from lamina.tiers.errors import StoreError
from lamina.tiers.nvme.pin import unpin
from lamina.tiers.nvme.pinned_reader import PinnedReader
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import NvmePath, Plane, PlaneSpec, ShardSpec

PLANES = (PlaneSpec(plane=Plane.PARAM, itemsize=2), PlaneSpec(plane=Plane.EXP_AVG, itemsize=4))
SHARDS = tuple(ShardSpec(name=f"block{i}", numel=n, planes=PLANES) for i, n in enumerate([5, 40_000, 100_003, 30_011]))
FROZEN = ShardSpec(name="embedding", numel=20_000, planes=PLANES[:1], frozen=True)


def content(shard: ShardSpec, spec: PlaneSpec, step: int) -> bytes:
    """What a plane holds at a step. Every third step leaves block2 as it was."""
    if shard.frozen:
        step = 0
    if shard.name == "block2" and step % 3 == 2:
        step -= 1
    key = f"{shard.name} {spec.plane} {step}".encode()
    return hashlib.shake_128(key).digest(shard.numel * spec.itemsize)


def front(shard: ShardSpec, step: int) -> int:
    """Elements of a shard that a step's generation leaves out."""
    return step // 4 % 3 * 10_000 if shard.name == "block3" else 0


def open_store(folder: Path, io: AsyncIO, generations: int, paths: int) -> GenerationStore:
    places = [NvmePath(path=str(folder / f"disk{i}"), weight=i + 1) for i in range(paths)]
    return GenerationStore.open(
        places, job="job", rank=0, shards=(*SHARDS, FROZEN), io=io, generations=generations, chunk_bytes=4096
    )


def update(folder: Path, generations: int, paths: int, pin: bool, tell: int) -> None:
    """Child: update for ever. Tells "t" before and "c" after the commit of a step. Two of three go on in the background, while
    the store is read: there "c" comes with the next begin()."""
    with AsyncIO(queue_depth=4) as io:
        store = open_store(folder, io, generations, paths)
        step = store.current.step if store.current else -1
        landing = False
        while True:
            step += 1
            store.leave_out((), {shard.name: front(shard, step) for shard in SHARDS if front(shard, step)})
            with store.begin() as transaction:
                if landing:
                    os.write(tell, f"c{step - 1}\n".encode())
                for shard in SHARDS if store.current else (*SHARDS, FROZEN):
                    for spec in shard.planes:
                        if shard.name == "block2" and step % 3 == 2 and store.current:
                            continue
                        data = content(shard, spec, step)
                        begin = front(shard, step) * spec.itemsize
                        half = begin + (len(data) - begin) // 3
                        transaction.write(shard.name, spec.plane, data[half:], offset=half)
                        transaction.write(shard.name, spec.plane, data[begin:half], offset=begin)
                if store.current:
                    transaction.copy_rest()
                os.write(tell, f"t{step}\n".encode())
                landing = generations > 1 and step % 3 > 0
                transaction.commit(step, {"step": step}, durable=step % 4 == 0, background=landing)
                if landing:
                    compare(store, step)
                else:
                    os.write(tell, f"c{step}\n".encode())
            if paths > 1 and step % 7 == 3:
                store.restripe([(step // 7 + index) % 3 + (index == 0) for index in range(paths)])
            if pin and step % 5 == 1:
                for old in folder.glob("pinned-*/manifest.json"):
                    if old.parent.name != f"pinned-{step % 3}":
                        unpin(str(old.parent))
                if not (folder / f"pinned-{step % 3}" / "manifest.json").exists():
                    store.pin(str(folder / f"pinned-{step % 3}"), background=step % 2 == 0)


def compare(store: GenerationStore, step: int) -> None:
    """Raises AssertionError where the store holds anything but the step's bytes."""
    for shard in (*SHARDS, FROZEN):
        for spec in shard.planes:
            begin = front(shard, step) * spec.itemsize
            buffer = bytearray(shard.numel * spec.itemsize - begin)
            store.read(shard.name, spec.plane, buffer, offset=begin).wait()
            if bytes(buffer) != content(shard, spec, step)[begin:]:
                raise AssertionError(f"{shard.name}/{spec.plane} is not that of step {step}")


def check(folder: Path, generations: int, paths: int, said: list[str]) -> str:
    """Reopen and compare. Returns what was found; raises AssertionError for a mixture or a lost step."""
    committed = max((int(line[1:]) for line in said if line[0] == "c"), default=-1)
    tried = max((int(line[1:]) for line in said if line[0] == "t"), default=-1)
    with AsyncIO(queue_depth=4) as io:
        try:
            store = open_store(folder, io, generations, paths)
        except StoreError as error:
            if generations == 1 and "in-place update" in str(error):
                return "torn"
            raise
        with store:
            step = store.current.step if store.current else -1
            # Without an announcement the step must be the one of the round before, which the caller checks.
            if committed >= 0 or tried >= 0:
                allowed = {committed, tried} if committed >= 0 else {tried - 1, tried}
                if step not in allowed:
                    raise AssertionError(f"found step {step}, allowed {sorted(allowed)}: {store.report()}")
            if store.current:
                compare(store, step)
            for pinned in folder.glob("pinned-*/manifest.json"):
                with PinnedReader(str(pinned.parent), io) as reader:
                    reader.sums(check=True)
                    for shard in (*SHARDS, FROZEN):
                        for spec in shard.planes:
                            begin = front(shard, reader.step) * spec.itemsize
                            buffer = bytearray(shard.numel * spec.itemsize - begin)
                            reader.read(shard.name, spec.plane, buffer).wait()
                            if bytes(buffer) != content(shard, spec, reader.step)[begin:]:
                                raise AssertionError(
                                    f"pinned {shard.name}/{spec.plane} is not that of step {reader.step}"
                                )
            names = {path.name for place in folder.glob("disk*") for path in (place / "job" / "rank0").iterdir()}
            strange = {n for n in names if not n.startswith(("gen-", "frozen")) and n not in ("lock", "manifest.json")}
            if strange:
                raise AssertionError(f"left behind: {strange}")
            generation_files = {name.split(".")[0] for name in names if name.startswith("gen-")}
            if len(generation_files) != generations:
                raise AssertionError(f"{len(generation_files)} generation files: {sorted(names)}")
            return str(step)


def in_child(work, *arguments: object) -> tuple[int, int]:
    """Fork; (pid, read end of the pipe that the child writes to)."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    os.close(read_end)
    code = 1
    try:
        work(write_end, *arguments)
        code = 0
    except BaseException as error:  # noqa: BLE001  reported to the zygote
        os.write(write_end, f"!{type(error).__name__}: {error}".replace("\n", " ").encode() + b"\n")
    os._exit(code)


def drain(fd: int, before: bytes = b"") -> list[str]:
    """Lines until the child has ended. ``before``: what was read already."""
    with os.fdopen(fd, "rb") as pipe:
        return [line.decode() for line in (before + pipe.read()).splitlines() if line.strip()]


def first_commit(fd: int) -> bytes:
    """What the child tells until its first commit, or until it has failed."""
    told = b""
    while b"c" not in told and b"!" not in told and (more := os.read(fd, 4096)):
        told += more
    return told


def main() -> None:
    folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    generations, paths, longest_s, pin = int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6]), len(sys.argv) > 7
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", BufferedIOWarning)  # in memory there is nothing to be direct to
    generator = random.Random(seed)
    found = {"rounds": 0, "advanced": 0, "torn": 0, "killed_in_commit": 0}
    last = -1
    for number in range(rounds):
        pid, pipe = in_child(lambda tell: update(folder, generations, paths, pin, tell))
        told = first_commit(pipe) if number % 2 else b""
        time.sleep(generator.uniform(0.002, longest_s))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        said = drain(pipe, told)
        if any(line.startswith("!") for line in said):
            sys.exit(f"the child failed: {said[-1]}")
        pid, pipe = in_child(lambda tell, s=said: os.write(tell, check(folder, generations, paths, s).encode()))
        answer = drain(pipe)[0]
        os.waitpid(pid, 0)
        if answer.startswith("!"):
            sys.exit(f"round {found['rounds']}, said {said[-3:]}: {answer}")
        found["rounds"] += 1
        if answer == "torn":
            found["torn"] += 1
            for path in folder.glob("disk*/job/rank0/*"):
                path.unlink()
            last = -1
            continue
        if not said and int(answer) != last:
            sys.exit(f"nothing was announced, but step {last} became {answer}")
        found["advanced"] += int(answer) > last
        found["killed_in_commit"] += bool(said) and said[-1][0] == "t"
        last = int(answer)
    print(json.dumps(found | {"last_step": last}))


if __name__ == "__main__":
    main()
