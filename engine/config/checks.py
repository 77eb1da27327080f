"""What no single key decides: the batch arithmetic and combinations that cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamina.engine.config.batch import BatchContradiction, resolve_batch

if TYPE_CHECKING:
    from lamina.engine.config.engine_config import EngineConfig
    from lamina.engine.config.reader import Reading

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_all(reading: Reading[Any], config: EngineConfig, world_size: int) -> EngineConfig:
    """Note every impossible combination in `reading`; the config comes back with its batch sizes derived."""
    return _batch(reading, config, world_size)


def _batch(reading: Reading[Any], config: EngineConfig, world_size: int) -> EngineConfig:
    if not reading.is_sound(*_BATCH_KEYS):
        return config
    given = {key: getattr(config, key) if key in config.model_fields_set else None for key in _BATCH_KEYS}
    train, micro, accumulation = (given[key] for key in _BATCH_KEYS)
    try:
        sizes = resolve_batch(train=train, micro=micro, accumulation=accumulation, world_size=world_size)
    except BatchContradiction as error:
        reading.fault(
            next((key for key in _BATCH_KEYS if given[key] is not None), _BATCH_KEYS[0]), str(error)
        )
        return config
    for key in _BATCH_KEYS:
        if given[key] is None:
            was_auto = key in reading.origins
            reading.origins[key] = "auto, derived from the others" if was_auto else "derived"
    update = dict(zip(_BATCH_KEYS, (sizes.train, sizes.micro, sizes.accumulation), strict=True))
    return config.model_copy(update=update)
