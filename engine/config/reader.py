"""From plain values to checked ones: known keys, "auto", types. Faults are collected, not raised."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from lamina.engine.config.auto import resolve_auto
from lamina.engine.config.block import Block
from lamina.engine.config.faults import faults, shown
from lamina.engine.config.key import Key, Status
from lamina.engine.config.optimizer import AdamConfig, AdamParams, TorchOptimizerConfig, optimizer_kind
from lamina.engine.config.scheduler import SCHEDULES, SchedulerConfig, schedule_name
from lamina.engine.config.table import block_of, extra, known_keys

Model = TypeVar("Model", bound=Block)


@dataclass(kw_only=True)
class Reading(Generic[Model]):
    """What was read so far. `bad` are the paths that a problem names: nothing is concluded from them."""

    model: type[Model]
    given: dict[str, Any]
    facts: Mapping[str, Any]
    problems: list[tuple[str, str]] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)

    def fault(self, path: str, message: str) -> None:
        """Note a problem."""
        self.problems.append((path, message))
        self.bad.add(path)

    def is_sound(self, *paths: str) -> bool:
        """Whether no problem concerns any of `paths`, what they contain or what contains them."""
        return not any(
            path == bad or path.startswith((f"{bad}.", f"{bad}[")) or bad.startswith((f"{path}.", f"{path}["))
            for path in paths
            for bad in self.bad
        )


def read(model: type[Model], given: dict[str, Any], facts: Mapping[str, Any]) -> tuple[Reading[Model], Model]:
    """Sort the keys of `given` and fill a `model`; faulty keys are noted and left at their defaults."""
    reading = Reading(model=model, given=given, facts=facts)
    walk = _Walk(reading, known_keys(model))
    values = walk.block(given, model, "")
    _check_facts(reading, walk.keys)
    return reading, _validate(reading, model, values)


class _Walk(Generic[Model]):
    """One pass over the given keys, which sorts each by the table."""

    def __init__(self, reading: Reading[Model], keys: Mapping[str, Key]) -> None:
        self.reading = reading
        self.keys = keys

    def block(self, given: Mapping[str, Any], model: type[Block] | None, path: str) -> dict[str, Any]:
        """The keys of one block that its model takes, under their own names and with "auto" filled in."""
        taken: dict[str, Any] = {}
        for name, value in given.items():
            where = f"{path}.{name}" if path else name
            row = self.keys.get(where)
            if row is not None and row.status is Status.RENAMED:
                new = row.instead.rpartition(".")[2]
                if new in given:
                    self.reading.fault(where, f"is another spelling of {row.instead}, which is given too: keep one")
                    continue
                self.reading.hints.append(f"{where}: is read as {row.instead}")
                where, name, row = row.instead, new, self.keys[row.instead]
            own = model is not None and name in model.model_fields
            if row is None or (row.status is Status.IMPLEMENTED and not own):
                self.reading.fault(where, self._unknown(where, model, path))
            elif value == {"enabled": False} and type(value) is dict and row.is_block:
                self.reading.origins[where] = "given (disabled)"
            elif own and model is not None:
                self._own(taken, name, value, model.model_fields[name], where)
            else:
                self._foreign(row, value, where)
        return taken

    def _own(self, taken: dict[str, Any], name: str, value: Any, info: FieldInfo, where: str) -> None:
        inner = block_of(info.annotation)
        if self.keys[where].is_block:
            if value is None and inner is not None:
                return
            if not isinstance(value, Mapping):
                self.reading.fault(where, f"want a block {{...}}, got {shown(value)}")
            elif inner is AdamConfig:
                taken[name] = self._optimizer(value, where)
            elif inner is SchedulerConfig:
                taken[name] = self._scheduler(value, where)
            else:
                taken[name] = self.block(value, inner, where)
            return
        reason = extra(info).get("hint")
        if reason is not None:
            self.reading.hints.append(f"{where}: {reason}")
        if value == "auto" and not extra(info).get("own_auto"):
            self._auto(taken, name, info, where)
            return
        self.reading.origins[where] = "given"
        taken[name] = value

    def _auto(self, taken: dict[str, Any], name: str, info: FieldInfo, where: str) -> None:
        found = resolve_auto(where, self.reading.facts)
        if found is not None:
            taken[name] = found.value
            self.reading.origins[where] = f"auto, from {found.source}"
        elif info.is_required():
            self.reading.fault(
                where,
                f'is "auto", and nothing decides it: write a value, or pass resolve={{"{where}": value}}',
            )
        else:
            self.reading.origins[where] = "auto, the default"

    def _foreign(self, row: Key, value: Any, where: str) -> None:
        """A key that no model holds: a hint, or refused unless it asks for nothing."""
        if row.status is Status.HINT:
            if row.is_block:
                if not isinstance(value, Mapping):
                    self.reading.fault(where, f"want a block {{...}}, got {shown(value)}")
                    return
                if value.get("enabled") is not False:
                    self.reading.hints.append(f"{where}: {row.reason}")
                self._hint_block(value, where)
                return
            if value != "auto" and row.types and not _has_type(value, row.types):
                self.reading.fault(where, f"want {_type_words(row.types)}, got {shown(value)}")
                return
            self.reading.hints.append(f"{where}: {row.reason}")
        elif row.is_block and isinstance(value, Mapping) and (value.get("enabled") is False or not value):
            self.reading.origins[where] = "given (disabled)"
        elif not row.is_neutral(value):
            given = "a block" if isinstance(value, Mapping) else shown(value)
            self.reading.fault(where, f"is not offered: {row.reason}; got {given}; write {row.instead} instead")

    def _hint_block(self, given: Mapping[str, Any], where: str) -> None:
        for name, value in given.items():
            path = f"{where}.{name}"
            row = self.keys.get(path)
            if row is None:
                self.reading.fault(path, self._unknown(path, None, where))
            elif row.status is Status.REFUSED:
                self._foreign(row, value, path)
            elif value != "auto" and row.types and not _has_type(value, row.types):
                self.reading.fault(path, f"want {_type_words(row.types)}, got {shown(value)}")

    def _optimizer(self, given: Mapping[str, Any], where: str) -> Any:
        """The optimizer block as a model of its type, or None after a fault."""
        kind, message = optimizer_kind(given.get("type"))
        if message is not None:
            self.reading.fault(f"{where}.type", message)
        outer = self.block(
            {key: value for key, value in given.items() if key not in ("type", "params")}, AdamConfig, where
        )
        params = given.get("params", {})
        if not isinstance(params, Mapping):
            self.reading.fault(f"{where}.params", f"want a block {{...}}, got {shown(params)}")
            return None
        if kind is None:
            return None
        self.reading.origins[f"{where}.type"] = "given"
        if kind.adam:
            outer["params"] = self.block(params, AdamParams, f"{where}.params")
            return self._built(AdamConfig, {**outer, "type": kind.name}, where)
        outer["params"] = self._torch_params(kind.parameters, params, f"{where}.params")
        return self._built(TorchOptimizerConfig, {**outer, "type": kind.name}, where)

    def _torch_params(self, parameters: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
        taken: dict[str, Any] = {}
        for name, value in given.items():
            path = f"{where}.{name}"
            if name not in parameters:
                near = difflib.get_close_matches(name, list(parameters), n=1)
                likely = f"; did you mean {where}.{near[0]}?" if near else f"; it takes {', '.join(parameters)}"
                self.reading.fault(path, f"is not a parameter of this optimizer{likely}")
            elif value == "auto":
                found = resolve_auto(path, self.reading.facts)
                self.reading.origins[path] = f"auto, from {found.source}" if found else "auto, the default"
                if found:
                    taken[name] = found.value
            else:
                self.reading.origins[path] = "given"
                taken[name] = value
        return taken

    def _scheduler(self, given: Mapping[str, Any], where: str) -> Any:
        name, message = schedule_name(given.get("type"))
        if message is not None:
            self.reading.fault(f"{where}.type", message)
        outer = self.block(
            {key: value for key, value in given.items() if key not in ("type", "params")},
            SchedulerConfig,
            where,
        )
        params = given.get("params", {})
        if not isinstance(params, Mapping):
            self.reading.fault(f"{where}.params", f"want a block {{...}}, got {shown(params)}")
            return None
        if name is None:
            return None
        self.reading.origins[f"{where}.type"] = "given"
        model = SCHEDULES[name]
        values = self.block(params, model, f"{where}.params")
        built = self._built(model, values, f"{where}.params")
        return None if built is None else self._built(SchedulerConfig, {**outer, "type": name, "params": built}, where)

    def _built(self, model: type[Block], values: dict[str, Any], where: str) -> Any:
        # A required key that already has a fault of its own must not be reported as missing too.
        try:
            return model.model_validate(values)
        except ValidationError as error:
            for path, _, message in faults(error, values, f"{where}."):
                if self.reading.is_sound(path):
                    self.reading.fault(path, message)
            return None

    def _unknown(self, where: str, model: type[Block] | None, path: str) -> str:
        """Words for a key that is not known here: the nearest one, or the place where it belongs."""
        name = where.rpartition(".")[2]
        beside = {
            key.rpartition(".")[2]: key
            for key, row in self.keys.items()
            if key.rpartition(".")[0] == path
            and (model is None or row.status is not Status.IMPLEMENTED or key.rpartition(".")[2] in model.model_fields)
        }
        elsewhere = [key for key in self.keys if key.rpartition(".")[2] == name]
        if where in self.keys and self.keys[where].status is Status.IMPLEMENTED:
            takes = ", ".join(model.model_fields) if model is not None else ""
            return f"does not belong to this type, which takes {takes}"
        near = difflib.get_close_matches(name.lower(), list(beside), n=1, cutoff=0.6)
        if near:
            return f"is not a known key; did you mean {beside[near[0]]}?"
        if len(elsewhere) == 1:
            return f"is not a known key here; did you mean {elsewhere[0]}?"
        everywhere = {key.rpartition(".")[2]: key for key in self.keys}
        near = difflib.get_close_matches(name.lower(), list(everywhere), n=1, cutoff=0.75)
        if near:
            return f"is not a known key; did you mean {everywhere[near[0]]}?"
        listed = ", ".join(sorted(beside)) if beside else ""
        return f"is not a known key; {'known here: ' + listed if listed else 'delete it'}"


def _check_facts(reading: Reading[Any], keys: Mapping[str, Key]) -> None:
    """Dotted names in `resolve` are config paths: a wrong one would be ignored silently."""
    for name in reading.facts:
        if "." in name and name not in keys:
            near = difflib.get_close_matches(name, list(keys), n=1)
            likely = f"; did you mean {near[0]}?" if near else ""
            reading.fault(f"resolve[{name!r}]", f"is not a path of the config{likely}")


def _validate(reading: Reading[Model], model: type[Model], values: dict[str, Any]) -> Model:
    """Fill the model; a faulty key is noted and taken out, and the rest is tried again."""
    values = {key: value for key, value in values.items() if value is not None or key not in ("optimizer", "scheduler")}
    while True:
        try:
            return model.model_validate(values)
        except ValidationError as error:
            for path, place, message in faults(error, values):
                reading.fault(path, message)
                _take_out(values, place)


def _take_out(values: dict[str, Any], place: list[str | int]) -> None:
    """Delete the innermost key on the way to `place` that is not inside a list, if it is still there."""
    inside: Any = values
    holder, last = values, str(place[0])
    for part in place:
        if not isinstance(inside, dict) or part not in inside:
            break
        holder, last = inside, str(part)
        inside = inside[last]
    holder.pop(last, None)


def _has_type(value: Any, types: tuple[type, ...]) -> bool:
    return any(type(value) is wanted for wanted in types)


def _type_words(types: tuple[type, ...]) -> str:
    words: Mapping[type, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a block {...}",
        type(None): "null",
    }
    return " or ".join(words[wanted] for wanted in types)
