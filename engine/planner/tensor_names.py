"""Model shapes from the names and shapes of tensors, as safetensors files tell them."""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.formed_groups import FormedGroups
from lamina.engine.planner.model_shape import ModelShape, ParamInventory

_BLOCK = re.compile(r"^(.*?\b(?:h|layers?|blocks?))\.(\d+)\.")
_POSITIONS = re.compile(r"pos|wpe", re.IGNORECASE)
_LARGEST_HEADER = 100_000_000  # the format's own limit


def shape_from_tensors(
    tensors: Mapping[str, Sequence[int]],
    *,
    name: str,
    heads: int | None = None,
    trainable: int | None = None,
    config: ModelShape | None = None,
    block_of: Mapping[str, str | None] | None = None,
    formed: FormedGroups | None = None,
) -> ModelShape:
    """A shape whose groups are counted from tensors.

    ``config`` gives what tensors do not tell (heads and kin), ``block_of`` the block of each tensor (without it, its name tells),
    ``formed`` the groups that the engine forms. Raises PlanError when no blocks or no embedding can be found.
    """
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    root: dict[str, tuple[int, ...]] = {}
    for key, raw in tensors.items():
        size = tuple(int(n) for n in raw)
        block = block_of[key] if block_of is not None else _block_named(key)
        (root if block is None else blocks.setdefault(block, {}))[key] = size
    tables = [size for key, size in root.items() if len(size) == 2 and not _POSITIONS.search(key)]
    if not blocks or not tables:
        what = "blocks (names such as layers.0.…)" if not blocks else "embedding outside of the blocks"
        raise PlanError(f"{name}: found no {what} among {len(tensors)} tensors; give layers=…,hidden=…,heads=…")
    vocab, hidden = max(tables, key=prod)
    before, after = _outside(list(tensors), root)
    inventory = ParamInventory(
        before=before,
        blocks=tuple(sum(prod(size) for size in block.values()) for block in blocks.values()),
        after=after,
        largest_param=max(prod(size) for size in tensors.values()),
        formed=formed,
    )
    head_bias = any(_is_bias_of_the_table(key, size, root, vocab) for key, size in root.items())
    if config is not None:
        tied = config.tied or head_bias
        return replace(config, inventory=inventory, trainable=trainable, tied=tied, head_bias=head_bias)
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
        tied=head_bias or len([size for size in tables if size[0] == vocab]) < 2,
        head_bias=head_bias,
        inventory=inventory,
        trainable=trainable,
        notes=tuple(notes),
    )


def _is_bias_of_the_table(key: str, size: Sequence[int], root: Mapping[str, Sequence[int]], vocab: int) -> bool:
    """Whether a tensor is the bias of an output matrix that is not there, as it is the table of tokens."""
    owner, _, name = key.rpartition(".")
    return name == "bias" and tuple(size) == (vocab,) and f"{owner}.weight" not in root


def _block_named(key: str) -> str | None:
    match = _BLOCK.match(key)
    return match and match.group(0)


def _outside(names: Sequence[str], root: Mapping[str, Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of each module outside the blocks: of those before the first block, and of the others."""
    first_block = next(at for at, name in enumerate(names) if name not in root)
    sides: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for at, name in enumerate(names):
        if name in root:
            side, owner = sides[at > first_block], name.rpartition(".")[0]
            side[owner] = side.get(owner, 0) + prod(root[name])
    return tuple(sides[0].values()), tuple(sides[1].values())


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
