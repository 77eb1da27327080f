"""Checkpoint folders: atomic, named when damaged, kept in number, safe to read; and what a client may keep in them."""

import collections
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import batch, build, on_nvme, settings

from lamina.engine import initialize
from lamina.engine.checkpoint import folder
from lamina.engine.checkpoint.plain import decode, encode
from lamina.tiers import IntegrityError, StoreError
from lamina.zero import get_full

SMALL = {"width": 16, "hidden": 32, "blocks": 2}


def engine_for(path: Path | None = None, **options: Any) -> Any:
    return initialize(build(**SMALL), config=settings(**(on_nvme(path, **options) if path else {})))[0]


def train(engine: Any, count: int = 1) -> None:
    for _ in range(count):
        engine.backward(engine(*batch(engine.global_steps)))
        engine.step()


def masters(engine: Any) -> list[torch.Tensor]:
    return [get_full(parameter, "master") for parameter in engine.module.parameters()]


def test_client_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "epoch": 3,
        "best": float("inf"),
        "names": ("a", "b"),
        "by number": {1: "one", 2: {3.5, 4.5}},
        "counter": collections.Counter({7: 2}),
        "$odd": None,
        "bytes": b"\0\xff",
        "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    }
    with engine_for() as engine:
        train(engine)
        path = engine.save_checkpoint(tmp_path, tag="t", client_state=state)
        assert path == str(tmp_path / "t")
        loaded, found = engine.load_checkpoint(tmp_path)
        assert loaded == path
        assert torch.equal(found.pop("tensor"), state.pop("tensor"))
        assert found == state
        assert [type(value) for value in found.values()] == [type(value) for value in state.values()]
        with pytest.raises(TypeError, match=r"client_state\.a\[1\]\.b is a object"):
            engine.save_checkpoint(tmp_path, tag="bad", client_state={"a": [1, {"b": object()}]})
        assert sorted(os.listdir(tmp_path)) == ["latest", "t"]


def test_encoding_refuses_what_it_did_not_write() -> None:
    assert decode(encode({"$a": 1})) == {"$a": 1}
    with pytest.raises(ValueError, match=r"\$exec"):
        decode({"$exec": "import os"})


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_the_same_tag_twice_keeps_the_newer(where: str, tmp_path: Path) -> None:
    with engine_for(tmp_path / "n" if where == "nvme" else None) as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "c", tag="same")
        train(engine)
        engine.save_checkpoint(tmp_path / "c", tag="same")
        wanted = masters(engine)
        train(engine)
        engine.load_checkpoint(tmp_path / "c")
        assert engine.global_steps == 2
        assert all(map(torch.equal, masters(engine), wanted))
        assert sorted(os.listdir(tmp_path / "c")) == ["latest", "same"]


def test_an_empty_folder_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with engine_for() as engine, pytest.raises(ValueError, match="save_dir is empty"):
        engine.save_checkpoint("")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("tag", ["../x", "a/b", ".hidden", "", "latest", "x" * 300])
def test_tags_stay_inside_the_folder(tag: str, tmp_path: Path) -> None:
    with engine_for() as engine, pytest.raises(ValueError, match="tag"):
        engine.save_checkpoint(tmp_path, tag=tag)
    (tmp_path / "latest").write_text("../outside")
    with pytest.raises(ValueError, match="tag"):
        folder.locate(str(tmp_path), None)


def test_the_last_few_are_kept_and_foreign_files_stay(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with engine_for(tmp_path / "n") as engine:
        for step in range(4):
            train(engine)
            path = engine.save_checkpoint(tmp_path, keep_last=2)
            if step == 0:
                (Path(path) / "readme.txt").write_text("a user's file")
        assert sorted(os.listdir(tmp_path)) == ["global_step1", "global_step3", "global_step4", "latest", "mine", "n"]
        assert os.listdir(tmp_path / "global_step1") == ["readme.txt"]
        engine.load_checkpoint(tmp_path, tag="global_step3")
        assert engine.global_steps == 3
        with pytest.raises(ValueError, match="keep_last is 0"):
            engine.save_checkpoint(tmp_path, keep_last=0)


def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead = Path(folder.begin(str(tmp_path), "a"))
    owner = json.loads((dead / "writer.json").read_text())
    (dead / "writer.json").write_text(json.dumps({**owner, "started": "1"}))
    living = Path(folder.begin(str(tmp_path), "b"))
    assert not dead.exists()
    foreign = tmp_path / ".c.partial-00000000"
    foreign.mkdir()
    (foreign / "writer.json").write_text(json.dumps({**owner, "host": "elsewhere", "started": "1"}))
    folder.remove_leftovers(str(tmp_path))
    assert living.exists()
    assert foreign.exists()


def test_a_crash_between_the_two_renames_leaves_a_checkpoint_to_load(tmp_path: Path) -> None:
    with engine_for() as engine:
        train(engine)
        path = Path(engine.save_checkpoint(tmp_path, tag="t"))
        path.rename(tmp_path / ".t.replaced-0123abcd")
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / ".t.replaced-0123abcd")
        engine.save_checkpoint(tmp_path, tag="t")
        assert sorted(os.listdir(tmp_path)) == ["latest", "t"]


def damage(path: Path, offset: int = 100) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("where", ["memory", "nvme", "state on the host"])
def test_missing_and_damaged_parts_are_named_and_nothing_is_changed(where: str, tmp_path: Path) -> None:
    placed = {"memory": {}, "nvme": {}, "state on the host": {"optimizer": "cpu"}}[where]
    with engine_for(tmp_path / "n" if where != "memory" else None, **placed) as engine:
        train(engine)
        whole = Path(engine.save_checkpoint(tmp_path / "c", tag="whole"))
        train(engine)
        files = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
        assert len(files) >= 3
        for name in files:
            for kind in ("missing", "damaged"):
                copy = tmp_path / "c" / "copy"
                shutil.copytree(whole, copy)
                if kind == "missing":
                    (copy / name).unlink()
                elif (copy / name).stat().st_size > 100:
                    damage(copy / name)
                else:
                    shutil.rmtree(copy)
                    continue
                before = masters(engine)
                with pytest.raises((IntegrityError, StoreError, FileNotFoundError)) as caught:
                    engine.load_checkpoint(tmp_path / "c", tag="copy")
                assert os.path.basename(name) in str(caught.value) or str(copy) in str(caught.value)
                if kind == "missing" or "planes" not in name:
                    assert all(map(torch.equal, masters(engine), before))
                if where == "nvme":
                    assert torch.isfinite(engine(*batch(0)))  # nothing was changed, so training may go on
                elif "planes" in name:
                    with pytest.raises(RuntimeError, match="a load was cut"):
                        engine(*batch(0))
                    engine.load_checkpoint(tmp_path / "c", tag="whole")
                shutil.rmtree(copy)
        engine.load_checkpoint(tmp_path / "c", tag="whole")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for() as engine:
        train(engine)
        engine.save_checkpoint(tmp_path, tag="one")

        def full(*_arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(folder, "write_json", full)
        with pytest.raises(OSError, match="No space left"):
            engine.save_checkpoint(tmp_path, tag="two")
        assert sorted(os.listdir(tmp_path)) == ["latest", "one"]
        assert (tmp_path / "latest").read_text() == "one"


def test_buffers_and_the_data_position_are_carried(tmp_path: Path) -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x)).pow(2).mean()

    data = [torch.full((4,), float(index)) for index in range(20)]

    def fresh() -> Any:
        torch.manual_seed(0)
        return initialize(Normed(), config=settings(), training_data=data, seed=3)

    engine, _, loader, _ = fresh()
    with engine:
        assert loader is engine.training_dataloader
        straight = [engine.train_batch().item() for _ in range(3)]
        engine.save_checkpoint(tmp_path)
        mean = engine.module.norm.running_mean.clone()
        straight += [engine.train_batch().item() for _ in range(9)]
    engine, _, _, _ = fresh()
    with engine:
        engine.load_checkpoint(tmp_path)
        assert torch.equal(engine.module.norm.running_mean, mean)
        assert [engine.train_batch().item() for _ in range(9)] == straight[3:]


def test_the_data_position_follows_another_micro_batch(tmp_path: Path) -> None:
    """The same samples come next, whatever their number per batch."""

    class Weight(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    data = [torch.tensor(float(index)) for index in range(24)]

    def fresh(micro: int) -> Any:
        config = settings(train_micro_batch_size_per_gpu=micro)
        return initialize(Weight(), config=config, training_data=data, seed=1)[0]

    with fresh(2) as engine:
        for _ in range(4):
            engine.train_batch()
        engine.save_checkpoint(tmp_path)
        wanted = torch.cat(list(engine.training_dataloader))
    with fresh(4) as engine:
        engine.load_checkpoint(tmp_path)
        rest = torch.cat(list(engine.training_dataloader))
    with fresh(4) as engine:
        everything = torch.cat(list(engine.training_dataloader))
    assert torch.equal(rest, everything[8:])
    assert wanted.numel() == 24  # iterating anew starts the next epoch


def test_pinned_state_is_linked_and_files_are_private(tmp_path: Path) -> None:
    with engine_for(tmp_path / "n") as engine:
        train(engine)
        path = Path(engine.save_checkpoint(tmp_path / "c"))
        pinned = list((path / "rank0" / "nvme").glob("gen-*"))
        assert pinned
        assert all(file.stat().st_nlink == 2 for file in pinned)
        for file in path.rglob("*"):
            assert file.stat().st_mode & 0o077 == 0, file
        engine.backward(engine(*batch(9)))
        with pytest.raises(RuntimeError, match="between backward"):
            engine.save_checkpoint(tmp_path / "c")
