"""What "auto" becomes: from the caller's arguments, from facts of the model, or from the default.

`resolve` may hold dotted config paths, the argument names of Hugging Face's TrainingArguments, and facts of
the model: `hidden_size`, `num_training_steps`. None stands for "not known".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A value found for "auto", and where it came from."""

    value: Any
    source: str


Facts = Mapping[str, Any]
Rule = Callable[[Facts], Resolved | None]


def resolve_auto(path: str, facts: Facts) -> Resolved | None:
    """The value for the key at `path`; None when neither an argument nor a fact of the model decides it."""
    if facts.get(path) is not None and facts[path] != "auto":
        return Resolved(value=facts[path], source=f"resolve[{path!r}]")
    rule = RULES.get(path)
    return None if rule is None else rule(facts)


def _argument(*names: str) -> Rule:
    def rule(facts: Facts) -> Resolved | None:
        for name in names:
            if facts.get(name) is not None:
                return Resolved(value=facts[name], source=name)
        return None

    return rule


def _betas(facts: Facts) -> Resolved | None:
    first, second = facts.get("adam_beta1"), facts.get("adam_beta2")
    if first is None and second is None:
        return None
    value = [0.9 if first is None else first, 0.999 if second is None else second]
    return Resolved(value=value, source="adam_beta1, adam_beta2")


def _total_steps(facts: Facts) -> Resolved | None:
    for name in ("num_training_steps", "total_num_steps", "max_steps"):
        steps = facts.get(name)
        # Trainers write -1 or 0 for "as many as the epochs need".
        if isinstance(steps, int | float) and steps > 0:
            return Resolved(value=steps, source=name)
    return None


def _warmup_steps(facts: Facts) -> Resolved | None:
    steps, ratio, total = facts.get("warmup_steps"), facts.get("warmup_ratio"), _total_steps(facts)
    if isinstance(steps, int | float) and steps > 0:
        return Resolved(value=steps, source="warmup_steps")
    if isinstance(ratio, int | float) and ratio > 0 and total is not None:
        return Resolved(value=math.ceil(total.value * ratio), source=f"warmup_ratio x {total.source}")
    # A ratio without a run length decides nothing, even beside warmup_steps = 0.
    if steps is not None and not ratio:
        return Resolved(value=steps, source="warmup_steps")
    return None


def _hidden(formula: Callable[[int], int], text: str) -> Rule:
    def rule(facts: Facts) -> Resolved | None:
        hidden = facts.get("hidden_size")
        if not isinstance(hidden, int) or isinstance(hidden, bool) or hidden < 1:
            return None
        return Resolved(value=formula(hidden), source=text)

    return rule


_ZERO = "zero_optimization"
RULES: Mapping[str, Rule] = {
    "train_batch_size": _argument("train_batch_size"),
    "train_micro_batch_size_per_gpu": _argument("per_device_train_batch_size"),
    "gradient_accumulation_steps": _argument("gradient_accumulation_steps"),
    "gradient_clipping": _argument("max_grad_norm"),
    "steps_per_print": _argument("logging_steps"),
    "optimizer.params.lr": _argument("learning_rate"),
    "optimizer.params.betas": _betas,
    "optimizer.params.eps": _argument("adam_epsilon"),
    "optimizer.params.weight_decay": _argument("weight_decay"),
    "scheduler.params.warmup_max_lr": _argument("learning_rate"),
    "scheduler.params.warmup_num_steps": _warmup_steps,
    "scheduler.params.total_num_steps": _total_steps,
    "fp16.enabled": _argument("fp16"),
    "bf16.enabled": _argument("bf16"),
    f"{_ZERO}.reduce_bucket_size": _hidden(lambda hidden: hidden * hidden, "hidden_size^2"),
    f"{_ZERO}.stage3_prefetch_bucket_size": _hidden(lambda hidden: hidden * hidden * 9 // 10, "0.9 hidden_size^2"),
    f"{_ZERO}.stage3_param_persistence_threshold": _hidden(lambda hidden: hidden * 10, "10 hidden_size"),
}
