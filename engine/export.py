"""Whole weights as safetensors that transformers.from_pretrained loads, written weight by weight.

One weight at a time is whole in memory. Tied weights are written once; the file's metadata names the others, as the
safetensors library does, so that ``safetensors.torch.load_model`` loads strictly.
"""

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lamina.zero import ZeroRuntime, get_full

from .config.quantities import parse_quantity
from .weight_names import Weight, weights_of

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(kw_only=True)
class _Shard:
    """One file: weights with their dtypes in it."""

    weights: list[tuple[Weight, torch.dtype]] = field(default_factory=list)
    nbytes: int = 0


def save_pretrained(
    module: nn.Module,
    runtime: ZeroRuntime,
    save_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    filename: str | None = None,
) -> str:
    """Write model.safetensors, or shards with an index, and config.json where the module has a config; the folder.

    ``dtype``: of floating-point weights (float32: the exact masters); default: the compute dtype. ``max_shard_size``:
    bytes, or text such as "5GB". Each file gets its name when it is complete. Collective: rank 0 writes.
    Raises TypeError for a weight whose dtype safetensors does not know, OSError.
    """
    folder = os.path.abspath(os.path.expanduser(os.fspath(save_dir)))
    limit = max_shard_size if isinstance(max_shard_size, int) else parse_quantity(max_shard_size, "bytes")
    shards = _cut(weights_of(module), dtype, limit)
    writes = runtime.ranks.rank == 0
    if writes:
        os.makedirs(folder, exist_ok=True)
    stem = (filename or "model.safetensors").removesuffix(".safetensors")
    names = (
        [f"{stem}.safetensors"]
        if len(shards) == 1
        else [f"{stem}-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    )
    for name, shard in zip(names, shards, strict=True):
        _write_shard(os.path.join(folder, name) if writes else None, shard)
    if writes:
        if len(shards) > 1:
            weight_map = {
                weight.name: name for name, shard in zip(names, shards, strict=True) for weight, _ in shard.weights
            }
            total = sum(shard.nbytes for shard in shards)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_text(os.path.join(folder, f"{stem}.safetensors.index.json"), json.dumps(index, indent=2))
        _write_config(module, folder, dtype or runtime.options.compute_dtype)
    return folder


def _cut(weights: Sequence[Weight], dtype: torch.dtype | None, limit: int) -> list[_Shard]:
    """Weights in order, a new file where the next would pass the limit."""
    if limit < 1:
        raise ValueError(f"max_shard_size is {limit}: want at least 1 byte")
    shards = [_Shard()]
    for weight in weights:
        kind = dtype if dtype is not None and weight.tensor.is_floating_point() else weight.tensor.dtype
        if kind not in DTYPE_NAMES:
            raise TypeError(f"{weight.name} is {kind}, which safetensors files do not hold")
        nbytes = weight.tensor.numel() * kind.itemsize
        if shards[-1].weights and shards[-1].nbytes + nbytes > limit:
            shards.append(_Shard())
        shards[-1].weights.append((weight, kind))
        shards[-1].nbytes += nbytes
    return shards


def _write_shard(path: str | None, shard: _Shard) -> None:
    """Stream one file; without a path only take part in gathering."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight, kind in shard.weights:
        end = offset + weight.tensor.numel() * kind.itemsize
        header[weight.name] = {
            "dtype": DTYPE_NAMES[kind],
            "shape": list(weight.tensor.shape),
            "data_offsets": [offset, end],
        }
        header["__metadata__"] |= dict.fromkeys(weight.aliases, weight.name)
        offset = end
    if path is None:
        for weight, kind in shard.weights:
            _values(weight, kind)
        return
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for weight, kind in shard.weights:
                values = _values(weight, kind)
                if values.numel():
                    file.write(values.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise


def _values(weight: Weight, kind: torch.dtype) -> torch.Tensor:
    """A whole weight on the CPU, in the wanted dtype. Collective for parameters."""
    tensor: torch.Tensor | None = weight.tensor
    if isinstance(tensor, nn.Parameter):
        exact = kind is torch.float32 and tensor.requires_grad and tensor.dtype is not torch.float32
        tensor = get_full(tensor, "master" if exact else "param")
    if tensor is None:
        raise RuntimeError(f"{weight.name} has no values")
    return tensor.detach().to(device="cpu", dtype=kind).contiguous()


def _write_text(path: str, text: str) -> None:
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    with open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)


def _write_config(module: nn.Module, folder: str, dtype: torch.dtype | None) -> None:
    """config.json (and generation_config.json) as transformers writes them, with the dtype of the file."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained") or not hasattr(config, "to_dict"):
        return
    config.save_pretrained(folder)
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    content["architectures"] = [type(module).__name__]
    if dtype is not None:
        content["dtype"] = str(dtype).removeprefix("torch.")
        content.pop("torch_dtype", None)
    _write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
