"""The largest model of a family that a machine can train."""

from collections.abc import Callable
from dataclasses import replace

from lamina.engine.planner.case import Case
from lamina.engine.planner.fit import fits as case_fits
from lamina.engine.planner.model_shape import ModelShape

_MOST_LAYERS = 1 << 14
_WIDTH_STEP = 128


def largest_depth(case: Case) -> ModelShape | None:
    """The case's model with as many blocks as fit; None when not even the fewest do.

    Bytes grow with depth on every tier, so halving the interval finds the border.
    """
    least = case.place.pipeline

    def fits(layers: int) -> bool:
        return case_fits(replace(case, model=case.model.with_layers(layers)))

    layers = _largest(fits, least, _MOST_LAYERS)
    return None if layers is None else replace(case.model.with_layers(layers), name=case.model.name)


def largest_gpt(case: Case) -> ModelShape | None:
    """The largest GPT-like model that fits: width first, at one block per 128 columns, then depth.

    Vocabulary, gating, norms and tying are those of the case's model; heads are 128 wide.
    """

    def shape(columns: int) -> ModelShape:
        hidden = columns * _WIDTH_STEP
        layers = min(max(columns, 12, case.place.pipeline), 128)
        model = case.model
        grouped = model.heads // model.kv_heads if model.kv_heads else 1
        ffn = round(model.ffn_width / model.hidden * hidden / 64) * 64
        kv = max(columns // grouped, 1) if model.kv_heads else 0
        return replace(
            model,
            name="largest",
            hidden=hidden,
            heads=columns,
            head_dim=_WIDTH_STEP,
            kv_heads=kv if kv and columns % kv == 0 else 0,
            ffn=ffn,
            layers=layers,
            root_extra=0,
            head_extra=0,
            inventory=None,
            trainable=None,
        )

    def fits(columns: int) -> bool:
        return case_fits(replace(case, model=shape(columns)))

    columns = _largest(fits, case.place.tensor, 4096)
    if columns is None:
        return None
    return largest_depth(replace(case, model=shape(columns)))


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number in low..high for which ``fits`` holds, given that it holds up to some border."""
    if not fits(low):
        return None
    reach = low
    while reach < high and fits(min(2 * reach, high)):
        low = reach = min(2 * reach, high)
    high = min(2 * reach, high)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
