"""Model shapes from the names and shapes of tensors: safetensors files or a torch module (also on the meta
device)."""

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.hf_config import usual_shape
from lamina.engine.planner.model_shape import ModelShape, ParamInventory

_BLOCK = re.compile(r"^(.*?\b(?:h|layers?|blocks?))\.(\d+)\.")
_POSITIONS = re.compile(r"pos|wpe", re.IGNORECASE)
_LARGEST_HEADER = 100_000_000  # the format's own limit


class _Parameter(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def requires_grad(self) -> bool: ...


class ModuleLike(Protocol):
    """What is read of a torch module: its parameters, tied ones once."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Names and parameters."""
        ...


def shape_from_tensors(
    tensors: Mapping[str, Sequence[int]],
    *,
    name: str,
    heads: int | None = None,
    trainable: int | None = None,
    config: ModelShape | None = None,
) -> ModelShape:
    """A shape whose groups are counted from tensors. ``config`` gives what tensors do not tell (heads and
    kin).

    Raises PlanError when no blocks or no embedding can be found.
    """
    blocks: dict[tuple[str, int], dict[str, tuple[int, ...]]] = {}
    root: dict[str, tuple[int, ...]] = {}
    for key, raw in tensors.items():
        size, match = tuple(int(n) for n in raw), _BLOCK.match(key)
        if match is None:
            root[key] = size
        else:
            blocks.setdefault((match.group(1), int(match.group(2))), {})[key] = size
    tables = [size for key, size in root.items() if len(size) == 2 and not _POSITIONS.search(key)]
    if not blocks or not tables:
        what = "blocks (names such as layers.0.…)" if not blocks else "an embedding outside of the blocks"
        raise PlanError(f"{name}: found no {what} among {len(tensors)} tensors; give layers=…,hidden=…,heads=…")
    vocab, hidden = max(tables, key=prod)
    before, after = _outside(list(tensors), root)
    inventory = ParamInventory(
        before=before,
        blocks=tuple(sum(prod(size) for size in block.values()) for block in blocks.values()),
        after=after,
        largest_param=max(prod(size) for size in tensors.values()),
    )
    if config is not None:
        return replace(config, inventory=inventory, trainable=trainable)
    first = next(iter(blocks.values()))
    widths = [max(size) for size in first.values() if len(size) == 2 and hidden in size and min(size) == hidden]
    widths += [max(size) for size in first.values() if len(size) == 2 and sorted(size)[0] == hidden]
    ffn = max((width for width in widths if width != 3 * hidden), default=4 * hidden)
    notes = []
    if heads is None:
        heads = max(hidden // (128 if hidden >= 2048 else 64), 1)
        notes.append(f"heads are not in the tensors: {heads} assumed (heads=… sets them)")
    is_ffn = [size for size in first.values() if sorted(size) == sorted((hidden, ffn))]
    return ModelShape(
        name=name,
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        head_dim=0 if hidden % heads == 0 else max(hidden // heads, 1),
        ffn=ffn,
        vocab=vocab,
        gated=len(is_ffn) >= 3,
        tied=len([size for size in tables if size[0] == vocab]) < 2,
        inventory=inventory,
        trainable=trainable,
        notes=tuple(notes),
    )


def _outside(names: Sequence[str], root: Mapping[str, Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of each module outside the blocks: of those before the first block, and of the others."""
    first_block = next(at for at, name in enumerate(names) if name not in root)
    sides: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for at, name in enumerate(names):
        if name in root:
            side, owner = sides[at > first_block], name.rpartition(".")[0]
            side[owner] = side.get(owner, 0) + prod(root[name])
    return tuple(sides[0].values()), tuple(sides[1].values())


def shape_from_module(module: ModuleLike, *, name: str, heads: int | None = None) -> ModelShape:
    """The shape of a torch module; nothing is read but names, shapes and ``requires_grad``.

    A Hugging Face module's own config tells heads and experts, where it names them as usual.
    """
    tensors, trainable = {}, 0
    for key, parameter in module.named_parameters():
        tensors[key] = tuple(int(n) for n in parameter.shape)
        trainable += prod(tensors[key]) if parameter.requires_grad else 0
    config = getattr(module, "config", None)
    known = None
    if config is not None and hasattr(config, "to_dict"):
        known = usual_shape(config.to_dict(), name=name, source=f"{name}.config")
    return shape_from_tensors(tensors, name=name, heads=heads, trainable=trainable, config=known)


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one safetensors file, from its header alone. Raises PlanError when it is no such
    file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise PlanError(f"{path}: no safetensors file: header of {length} bytes in a file of {size}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        return {key: tuple(value["shape"]) for key, value in header.items() if key != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError(f"{path}: the safetensors header is damaged ({error})") from error


def indexed_shapes(index: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all files that a safetensors index names; they must lie beside it.

    Raises PlanError that names what is missing or points elsewhere.
    """
    try:
        files = json.loads(index.read_text())["weight_map"]
        wanted = {str(name) for name in files.values()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError(f"{index}: no safetensors index: weight_map is missing or damaged ({error})") from error
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(wanted):
        if Path(name).name != name:
            raise PlanError(f"{index}: {name!r} points outside of the index's folder")
        part = index.parent / name
        if not part.is_file():
            raise PlanError(f"{index}: names {name}, which is missing; the header of every part is needed")
        found.update(safetensors_shapes(part))
    missing = sorted(set(files) - set(found))
    if missing:
        raise PlanError(f"{index}: {len(missing)} tensors are in no part, the first is {missing[0]}")
    return found
