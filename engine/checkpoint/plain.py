"""Values as JSON and back, exactly: what JSON has no word for is wrapped as {"$kind": value}. Nothing else is accepted.

Written instead of pickle: reading it can build numbers, strings, containers and tensors, and run nothing.
"""

import base64
import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, path: str = "value") -> Any:
    """Plain JSON values. Raises TypeError naming the path of what cannot be kept."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is list:
        return [encode(inner, f"{path}[{index}]") for index, inner in enumerate(value)]
    if type(value) in (tuple, set, frozenset):
        kind = f"${type(value).__name__}"
        return {kind: [encode(inner, f"{path}[{index}]") for index, inner in enumerate(value)]}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _encode_tensor(value)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path)
    raise TypeError(
        f"{path} is a {type(value).__name__}: a checkpoint keeps None, truth values, numbers, strings, bytes, tensors, and "
        f"lists, tuples, sets and dicts of them"
    )


def _encode_mapping(value: Mapping[Any, Any], path: str) -> Any:
    if type(value) is collections.Counter:
        return {"$Counter": [[encode(k, path), encode(v, f"{path}[{k!r}]")] for k, v in value.items()]}
    if type(value) not in (dict, collections.OrderedDict, collections.defaultdict):
        raise TypeError(f"{path} is a {type(value).__name__}: make it a dict")
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(inner, f"{path}.{key}") for key, inner in value.items()}
    return {"$dict": [[encode(k, f"key of {path}"), encode(v, f"{path}[{k!r}]")] for k, v in value.items()]}


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    held = tensor.detach().cpu().contiguous()
    data = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(data).decode(),
    }


def decode(value: Any) -> Any:
    """What ``encode`` was given. Raises ValueError for what it never writes."""
    if isinstance(value, list):
        return [decode(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    wrapped = [key for key in value if key.startswith("$")]
    if not wrapped:
        return {key: decode(inner) for key, inner in value.items()}
    kind = wrapped[0]
    if len(value) != 1 or kind not in _DECODERS:
        raise ValueError(f"{', '.join(wrapped)} is nothing that a checkpoint is written with")
    return _DECODERS[kind](value[kind])


def _pairs(listed: Any) -> dict[Any, Any]:
    return {decode(key): decode(inner) for key, inner in listed}


def _decode_tensor(held: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, str(held["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{held['dtype']!r} is no dtype")
    data = bytearray(base64.b64decode(held["data"]))
    shape = [int(length) for length in held["shape"]]
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).clone()


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "$float": lambda text: _FLOATS[text],
    "$tuple": lambda listed: tuple(decode(inner) for inner in listed),
    "$set": lambda listed: {decode(inner) for inner in listed},
    "$frozenset": lambda listed: frozenset(decode(inner) for inner in listed),
    "$bytes": base64.b64decode,
    "$dict": _pairs,
    "$Counter": lambda listed: collections.Counter(_pairs(listed)),
    "$tensor": _decode_tensor,
}
