"""Model shapes from a ``config.json`` of any family: those that are not read here are counted by transformers' own definition."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.hf_config import is_known, shape_from_config
from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.module_shape import shape_from_module


def shape_of_family(config: Mapping[str, Any], *, name: str, source: str) -> ModelShape:
    """The shape that a config describes. Raises PlanError that names the missing or wrong field, or what is not known.

    Code that a config names outside of transformers (``auto_map``) is never loaded or run.
    """
    kind = str(config.get("model_type") or "")
    if is_known(config) or not kind:
        return shape_from_config(config, name=name, source=source)
    if find_spec("transformers") is None:
        raise PlanError(
            f"{source}: model_type {kind!r} with {_class_name(config) or 'no class named'} is not read here, and transformers, "
            "which may define it, is not installed (pip install lamina[hf]); or give a safetensors file or index, or "
            "layers=…,hidden=…,heads=…"
        )
    return _from_library(config, kind, name=name, source=source)


def _class_name(config: Mapping[str, Any]) -> str:
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list | tuple) and classes else ""


def _from_library(config: Mapping[str, Any], kind: str, *, name: str, source: str) -> ModelShape:
    # Both take seconds to import, and most models need neither.
    import torch
    import transformers

    if kind not in transformers.CONFIG_MAPPING:
        own = " (the config's auto_map names code of its own, which is not run)" if config.get("auto_map") else ""
        raise PlanError(
            f"{source}: transformers {transformers.__version__} does not know model_type {kind!r}{own}; give the model's "
            "safetensors file or index, or layers=…,hidden=…,heads=…"
        )
    values = {
        key: value for key, value in config.items() if key not in ("model_type", "auto_map", "transformers_version")
    }
    try:
        with torch.device("meta"):
            made = transformers.AutoConfig.for_model(kind, **values)
            module = _class(transformers, config, made)(made)
    except Exception as error:  # whatever a definition of other people's raises for values that it does not expect
        raise PlanError(f"{source}: transformers cannot build a {kind} model of this config ({error})") from error
    note = f"counted as transformers {transformers.__version__} builds {type(module).__name__}"
    heads = getattr(made.get_text_config(), "num_attention_heads", None)
    shape = shape_from_module(module, name=name, heads=heads or None)
    return replace(shape, notes=(*shape.notes, note))


def _class(transformers: Any, config: Mapping[str, Any], made: Any) -> Any:
    """The class that the config names; else the one with a language model's head, or the bare model. Of an encoder with a decoder
    always the bare model: what has a causal head there is the decoder alone."""
    named = getattr(transformers, _class_name(config), None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    both = ("MODEL_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING")
    two_sided = getattr(made, "is_encoder_decoder", False)
    for auto in both if two_sided else ("MODEL_FOR_CAUSAL_LM_MAPPING", *reversed(both)):
        mapping = getattr(transformers, auto)
        if type(made) in mapping:
            found = mapping[type(made)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"no model class for {type(made).__name__}")
