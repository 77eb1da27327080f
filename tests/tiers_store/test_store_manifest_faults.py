"""The path that holds the manifest fails, and any call of the operating system once: never a wrong or lost generation."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_samples import SHARDS, random_state, read_all, write_all

import lamina.tiers.nvme.folder as folder_module
import lamina.tiers.nvme.manifest as manifest_module
import lamina.tiers.nvme.slot as slot_module
from lamina.tiers.errors import StorageFault, StoreError
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import NvmePath

Open = Callable[..., GenerationStore]
MODULES = (folder_module, manifest_module, slot_module)
CALLS = ("open", "write", "fsync", "rename", "unlink", "stat", "lstat")


class FaultyOS:
    """os, of which one call on files under `where` fails: always when number is -1, else the number-th one."""

    def __init__(self, where: Path, code: int, calls: tuple[str, ...], number: int = -1) -> None:
        self.where, self.code, self.calls, self.number = str(where), code, calls, number
        self.count = 0
        self.hit = ""
        self._names: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(target: Any, *rest: Any, **options: Any) -> Any:
            path = self._names.get(target, "") if isinstance(target, int) else os.fspath(target)
            if name in self.calls and path.startswith(self.where):
                self.count += 1
                if self.number in (-1, self.count - 1):
                    self.hit = f"{name} {path}"
                    if name == "write":
                        real(target, bytes(rest[0])[:50])
                    raise OSError(self.code, os.strerror(self.code), path)
            found = real(target, *rest, **options)
            if name == "open":
                self._names[found] = path
            return found

        return call


def use(patch: pytest.MonkeyPatch, shim: FaultyOS) -> None:
    for module in MODULES:
        patch.setattr(module, "os", shim)


def two(tmp_path: Path) -> list[NvmePath]:
    return [NvmePath(path=str(tmp_path / name)) for name in "ab"]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_the_manifest_moves_to_another_path(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    store = open_store(two(tmp_path))
    write_all(store, random_state(), 0)
    state = random_state()
    manifests = [tmp_path / name / "job" / "rank0" / "manifest.json" for name in "ab"]
    old = manifests[0].read_bytes()
    with monkeypatch.context() as patch:
        # Only the manifest's own files: the generation's are the engine's, which can still write them.
        use(patch, FaultyOS(manifests[0], code, (call,)))
        with store.begin() as transaction:
            for key, data in state.items():
                transaction.write(*key, data)
            transaction.commit(1)
    assert f"moved to {manifests[1].parent}" in store.report()
    assert read_all(store) == state
    assert [path.exists() for path in manifests] == [False, True]
    for step in range(2, 5):
        state = random_state()
        write_all(store, state, step)
    assert [share > 0 for share in store.shares] == [code == errno.ENOSPC, True]
    store.close()
    manifests[0].write_bytes(old)  # the path is back, with what it had
    store = open_store(two(tmp_path))
    assert f"removed {manifests[0]}, which is older" in store.report()
    assert store.current is not None
    assert store.current.step == 4
    assert read_all(store) == state
    store.close(remove=True)
    assert not any((tmp_path / name / "job").exists() for name in "ab")


def test_both_paths_failing_leave_the_last_generation(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(two(tmp_path))
    state = random_state()
    write_all(store, state, 0)
    with monkeypatch.context() as patch:
        use(patch, FaultyOS(tmp_path, errno.ENOSPC, ("write",)))
        with pytest.raises(StorageFault, match=r"writing .*a/job/rank0/manifest\.json failed.*generation is intact"):
            write_all(store, random_state(), 1)
    assert "cannot take the manifest over" in store.report()
    assert read_all(store) == state
    new = random_state()
    write_all(store, new, 1)
    store.close()
    assert read_all(open_store(two(tmp_path))) == new


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("num_paths", [1, 2])
def test_every_call_of_the_system_fails_once(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, num_paths: int
) -> None:
    """Updates, a checkpoint that makes new files necessary, and other stripes, with each call failing once."""
    paths = two(tmp_path)[:num_paths]
    outcomes = {"went on": 0, "refused": 0}
    for number in range(200):
        for name in "ab":
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        store = open_store(paths)
        state = new = random_state()
        write_all(store, state, 0)
        shim = FaultyOS(tmp_path / "a", code, CALLS, number)
        step, failure, unknown = 0, None, ""
        with monkeypatch.context() as patch:
            use(patch, shim)
            try:
                store.restripe([number % 3 + 1, 1][:num_paths])
                for step in range(1, 4):
                    new = random_state()
                    write_all(store, new, step, durable=step == 2)
                    state = new
            except (StoreError, OSError) as error:
                failure = error
        assert failure is None or shim.hit, failure
        outcomes["refused" if failure else "went on"] += 1
        found = {}
        try:
            found = read_all(store)
        except StoreError as error:
            unknown = str(error)
        assert bool(found) or "open it again" in unknown, (shim.hit, unknown)
        store.close()
        store = open_store(paths)
        after = read_all(store)
        # The commit that was refused may count when nobody could tell, but only as a whole.
        assert after in (state, new), (shim.hit, step)
        assert found in ({}, after), (shim.hit, step)
        newest = random_state()
        write_all(store, newest, 9)
        assert read_all(store) == newest
        files = [path for path in tmp_path.rglob("gen-*.bin") if path.name.count(".s") == 0]
        assert len({path.name for path in tmp_path.rglob("gen-*.bin")}) <= 2 * num_paths, (shim.hit, files)
        store.close()
        if not shim.hit:
            break
    assert not shim.hit
    assert outcomes["went on"] >= 1
    assert outcomes["refused"] >= 1


def test_revisions_count_up(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    path = tmp_path / "nvme" / "job" / "rank0" / "manifest.json"
    seen = []
    for step in range(3):
        write_all(store, random_state(SHARDS), step)
        seen.append(json.loads(path.read_bytes())["revision"])
    assert seen == sorted(set(seen))
