"""Run on every rank by test_checkpoint_ranks: saves and loads on two ranks; what it finds is JSON on rank 0's last line."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from small_model import batch, build, on_nvme, settings
from torch import distributed as dist

from lamina.engine import initialize
from lamina.engine.checkpoint import pending
from lamina.zero import get_full

ODD = {"width": 13, "hidden": 29, "blocks": 2, "vocab": 101}
PLANES = ("master", "exp_avg", "exp_avg_sq")


def placements(folder: Path) -> dict[str, dict[str, Any]]:
    shared = {"device": "nvme", "nvme_path": str(folder), "ratio": 0.6}
    return {
        "stage 0": {"zero_optimization": {"stage": 0}},
        "stage 1": {"zero_optimization": {"stage": 1}},
        "stage 3": {"zero_optimization": {"stage": 3}},
        "nvme": on_nvme(folder),
        "shares": {"zero_optimization": {"stage": 3, "offload_optimizer": shared}},
    }


def fresh(changes: dict[str, Any], **options: Any) -> Any:
    bf16 = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    return initialize(build(**ODD), config=settings(**bf16, **changes), **options)[0]


def train(engine: Any, first: int, last: int) -> None:
    """Micro-batches [first, last) of this rank."""
    for index in range(first, last):
        engine.backward(engine(*batch(index * dist.get_world_size() + dist.get_rank(), ODD["vocab"])))
        engine.step()


def state(engine: Any) -> dict[str, torch.Tensor]:
    return {
        f"{name} {plane}": get_full(parameter, plane)
        for name, parameter in engine.module.named_parameters()
        for plane in PLANES
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def resumes(folder: Path) -> dict[str, bool]:
    """Every placement into every other (shares into themselves, to nvme and from it), saved in mid-window: is the state after
    two more steps that of the straight run?"""
    found = {}
    for before, changes in placements(folder / "n").items():
        with fresh(changes) as engine:
            train(engine, 0, 3)
            engine.save_checkpoint(folder / before, client_state={"rank": dist.get_rank()})
            train(engine, 3, 6)
            wanted = state(engine)
        for after, others in placements(folder / "n").items():
            if "shares" in (before, after) and not {before, after} <= {"shares", "nvme"}:
                continue
            with fresh(others) as engine:
                _, client = engine.load_checkpoint(folder / before)
                train(engine, 3, 6)
                found[f"{before} -> {after}"] = same(state(engine), wanted) and client == {"rank": 0}
    return found


def for_one_rank(folder: Path) -> None:
    """A checkpoint and the state that it holds, to be loaded by a single process."""
    with fresh(placements(folder / "n")["nvme"]) as engine:
        train(engine, 0, 4)
        engine.save_checkpoint(folder / "from two")
        whole = state(engine)
        engine.save_pretrained(folder / "weights", dtype=torch.float32)
    if dist.get_rank() == 0:
        save_file(whole, folder / "state of two.safetensors")


def from_one_rank(folder: Path) -> dict[str, dict[str, list[float]]]:
    """The state that a single process saved, as this world size loads it."""
    found = {}
    for name, changes in placements(folder / "n").items():
        with fresh(changes) as engine:
            engine.load_checkpoint(folder / "from one")
            found[name] = {key: value.flatten().tolist() for key, value in state(engine).items()}
    return found


def with_client(kind: str) -> Any:
    config = settings(optimizer={"type": kind, "params": {"lr": 1e-3}}, zero_optimization={"stage": 3})
    return initialize(build(**ODD), config=config)[0]


def client_state(engine: Any) -> dict[str, list[Any]]:
    """By parameter and key: the elements [first, last) that this rank has, and their values."""
    places = {place.name: place for place in engine.optimizer.master_slices()}
    return {
        f"{name} {key}": [places[name].first, places[name].last, tensor.reshape(-1).tolist()]
        for (name, key), tensor in engine.optimizer.state_tensors().items()
    }


def clients(folder: Path) -> dict[str, Any]:
    """State of torch's optimizers: what one process saved, as each rank has it; what the ranks saved; and a refusal."""
    found: dict[str, Any] = {}
    with with_client("NAdam") as engine:
        engine.load_checkpoint(folder / "client one")
        found["loaded"] = client_state(engine)
        train(engine, 2, 3)
        engine.save_checkpoint(folder / "client two")
        found["saved"] = client_state(engine)
    with with_client("Adafactor") as engine:
        try:
            engine.load_checkpoint(folder / "factored one")
        except ValueError as error:
            found["refused"] = str(error)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    return {key: [of_one[key] for of_one in everybody] for key in found}


def rules(folder: Path) -> dict[str, str]:
    """D-06: unlike tags, and a rank that saves alone."""
    found = {}
    with fresh({}, timeout_s=5) as engine:
        try:
            engine.save_checkpoint(folder / "rules", tag=f"tag{dist.get_rank()}")
        except ValueError as error:
            found["unlike tags"] = str(error)
        if dist.get_rank() == 0:
            try:
                engine.save_checkpoint(folder / "rules", tag="alone")
            except RuntimeError as error:
                found["alone"] = "; ".join([type(error).__name__, *error.__notes__])
    return found


def in_the_background(folder: Path) -> dict[str, bool]:
    """Saved while two more steps are taken; then one that fails on rank 1."""
    found = {}
    for name, changes in placements(folder / "n").items():
        with fresh(changes) as engine:
            train(engine, 0, 3)
            wanted = state(engine)
            path = engine.save_checkpoint(folder / "background", tag=name.replace(" ", ""), background=True)
            train(engine, 3, 6)
            same_path = engine.wait_for_checkpoint() == path
            engine.load_checkpoint(folder / "background")
            found[name] = same_path and same(state(engine), wanted)
    return found


def fails_on_one_rank(folder: Path) -> dict[str, str]:
    def full(_paths: Any) -> None:
        raise OSError(28, "No space left on device")

    with fresh({}) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(folder / "background", tag="good")
        original = pending.sync_all
        if dist.get_rank() == 1:
            pending.sync_all = full
        engine.save_checkpoint(folder / "background", tag="bad", background=True)
        try:
            engine.wait_for_checkpoint()
            told = "nothing"
        except (RuntimeError, OSError) as error:
            told = str(error)
        pending.sync_all = original
        dist.barrier()
        latest = (folder / "background" / "latest").read_text()
    return {"told": told, "latest": latest, "bad": str((folder / "background" / "bad").exists())}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {"resumes": resumes(folder), "from one": from_one_rank(folder)}
    for_one_rank(folder)
    results["clients"] = clients(folder)
    results["background"] = in_the_background(folder)
    results["fails"] = fails_on_one_rank(folder)
    results["rules"] = rules(folder)
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
