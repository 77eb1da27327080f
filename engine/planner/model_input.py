"""Finds the model that a user means: a preset's name, a file or folder, or numbers."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lamina.engine.checkpoint.deepspeed import refuse_deepspeed
from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.hf_config import usual_shape
from lamina.engine.planner.hf_library import shape_of_family
from lamina.engine.planner.model_presets import MODEL_PRESETS, model_preset
from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.quantity import parse_number
from lamina.engine.planner.tensor_names import indexed_shapes, safetensors_shapes, shape_from_tensors

_NUMBERS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocab",
    "positions",
    "experts",
    "experts_active",
    "trainable",
)
_USUAL = ("kv_heads", "head_dim", "ffn")
"""Numbers that a shape has a usual value for."""
_FLAGS = ("gated", "bias", "tied", "norm_bias", "qk_norm", "final_norm")


def read_model(text: str) -> ModelShape:
    """The model that ``text`` names.

    A preset (``llama-70b``), a folder or file (config.json, a safetensors file or index), or numbers
    (``layers=12,hidden=768,heads=12``). Raises PlanError naming what is missing.
    """
    if "=" in text and not Path(text).exists():
        return model_from_numbers(dict(_pair(part) for part in text.split(",") if part.strip()))
    path = Path(text)
    if text.lower() in MODEL_PRESETS or not path.exists():
        return model_preset(text)
    return _from_folder(path) if path.is_dir() else _from_file(path)


def _pair(part: str) -> tuple[str, str]:
    key, equals, value = part.partition("=")
    if not equals:
        raise PlanError(f"model: {part!r} is no number of a shape; write name=number")
    return key.strip(), value.strip()


def model_from_numbers(values: Mapping[str, Any]) -> ModelShape:
    """A shape from plain numbers; layers, hidden and heads must be given."""
    known = {item.name for item in fields(ModelShape)}
    result: dict[str, Any] = {"name": str(values.get("name", "model"))}
    for key, value in values.items():
        if key in _NUMBERS:
            result[key] = int(parse_number(value, what=f"model: {key}"))
            if key in _USUAL and result[key] == 0:
                raise PlanError(f"model: {key} is 0; it must be at least 1, or leave it out for the usual one")
        elif key in _FLAGS:
            if str(value).lower() not in ("true", "false", "1", "0"):
                raise PlanError(f"model: {key}: {value!r} must be true or false")
            result[key] = str(value).lower() in ("true", "1")
        elif key not in known:
            raise PlanError(f"model: {key!r} is unknown; write some of {', '.join((*_NUMBERS, *_FLAGS))}")
    missing = [name for name in ("layers", "hidden", "heads") if name not in result]
    if missing:
        raise PlanError(f"model: {', '.join(missing)} missing; give layers=…,hidden=…,heads=…")
    return ModelShape(**result)


def _from_folder(path: Path) -> ModelShape:
    config = path / "config.json"
    index = path / "model.safetensors.index.json"
    files = sorted(path.glob("*.safetensors"))
    if index.is_file():
        shapes = indexed_shapes(index)
    elif files:
        shapes = {key: size for file in files for key, size in safetensors_shapes(file).items()}
    elif config.is_file():
        return _from_config(config)
    else:
        refuse_deepspeed(path)
        raise PlanError(f"{path}: neither config.json nor safetensors files are in this folder")
    return shape_from_tensors(shapes, name=path.name or str(path), config=_beside(config))


def _from_file(path: Path) -> ModelShape:
    config = path.parent / "config.json"
    if path.name.endswith(".safetensors.index.json"):
        shapes = indexed_shapes(path)
    elif path.suffix == ".safetensors":
        shapes = safetensors_shapes(path)
    elif path.suffix == ".json":
        return _from_config(path)
    else:
        refuse_deepspeed(path)
        raise PlanError(f"{path}: is neither a config.json nor a safetensors file or index")
    return shape_from_tensors(shapes, name=path.stem, config=_beside(config))


def _from_config(path: Path) -> ModelShape:
    values = read_object(path)
    return shape_of_family(values, name=_name(values, path), source=str(path))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises PlanError when it is none or cannot be read."""
    try:
        values = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise PlanError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise PlanError(f"{path}: is no JSON object")
    return values


def _name(values: Mapping[str, Any], path: Path) -> str:
    return str(values.get("_name_or_path") or path.parent.name or path.stem)


def _beside(path: Path) -> ModelShape | None:
    """What a config beside the tensors says of heads and widths; None where there is none, or it does not."""
    if not path.is_file():
        return None
    values = read_object(path)
    return usual_shape(values, name=_name(values, path), source=str(path))
