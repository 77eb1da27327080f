"""DeepSpeed's other arguments of initialize(): where the config may come from, and how the ranks find each other."""

import os
from typing import Any

import torch
from torch import distributed as dist

from .config import ConfigError


def config_of(config: Any, config_params: Any, args: Any) -> Any:
    """The one config that was given. Raises ConfigError when it is missing or given twice."""
    named = getattr(args, "deepspeed_config", None)
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": named,
    }
    ways = [way for way, value in given.items() if value is not None]
    if len(ways) > 1:
        raise ConfigError([("", f"is given as {' and '.join(ways)}: keep one of them")])
    if not ways:
        raise ConfigError([("", 'is missing: pass the path of a JSON file or a mapping, {"train_batch_size": 8, …}')])
    return given[ways[0]]


def refuse_arguments(*, mpu: Any, mesh_param: Any) -> None:
    """Raises ValueError for what would change which ranks share what."""
    if mpu is not None:
        raise ValueError("mpu: model-parallel units are not taken: all ranks are data-parallel here; leave it out")
    if mesh_param is not None:
        raise ValueError("mesh_param: a mesh of ranks is not taken: all ranks are data-parallel here; leave it out")


def join_ranks(required: bool | None, port: int | None) -> None:
    """Join the ranks that torchrun (or another launcher) has described in the environment, unless somebody did already.

    ``required``: True insists, False leaves it to the script. Raises ValueError when it is required and not described.
    """
    if required is False or not dist.is_available() or dist.is_initialized():
        return
    described = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    if not described:
        if required:
            raise ValueError(
                "dist_init_required is True, but RANK, WORLD_SIZE and MASTER_ADDR are not set: start with torchrun"
            )
        return
    if int(os.environ["WORLD_SIZE"]) > 1 or required:
        address, own_port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT") or port
        if own_port is None:
            raise ValueError("MASTER_PORT is not set: start with torchrun, or pass distributed_port")
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"tcp://{address}:{own_port}" if "MASTER_PORT" not in os.environ else "env://",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )


def place_among_ranks() -> tuple[int, int]:
    """This rank and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
