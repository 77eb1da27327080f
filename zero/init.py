"""``with Init(config=...): model = BigModel()``: parameters leave memory as soon as the module that made them is finished.

[Note: construction] Torch calls two hooks while modules are built: when a parameter is registered, and when a finished
child is given to its parent. At the first the parameters of other modules are put away (see [Note: away]), at the second
the child's. It may be too early: what later code does with them (initialisation, ties, copies of pretrained values) finds
them whole all the same, as a function that is given one brings it back, and a few stay until others are needed. The hooks
and the mode end with the block.

[Note: shared on one rank] What shares its memory with another tensor is not put away. Whether it does may be a matter of
time: gloo's threads keep what they have summed a little longer than the sum takes. Putting away is collective, so the ranks
agree: what is shared on one of them stays on all.
"""

import json
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lamina.tiers.memory.heap import Heap

from .groups.fetch_on_use import READING_GETTERS
from .homes.away import Attic, bring_back, is_away, only_user, put_away, record_of
from .ranks.collectives import Ranks

OPEN_BYTES = 64 << 20
RESET = "reset_parameters"


class Init(TorchFunctionMode):
    """Builds a model whose values are never all in memory. Give the model to ``initialize()`` afterwards.

    ``config``: the engine's config (a mapping, or the path of a JSON file); its first NVMe path takes the values. Without one
    they stay in memory: all of them on one rank, 1/N on N ranks. ``nvme_path`` names a folder instead. ``open_bytes``: how
    much of what was brought back may stay in memory at a time. Parameters of integers stay where they are. ``folder`` is where
    the values go, None when they stay in memory.

    With several ranks, all of them must build the same model; rank 0's values count.
    """

    def __init__(
        self, config: Any = None, *, nvme_path: str | os.PathLike[str] | None = None, open_bytes: int = OPEN_BYTES
    ) -> None:
        super().__init__()
        self.folder = os.fspath(nvme_path) if nvme_path is not None else _first_nvme_path(config)
        self._open_bytes = open_bytes
        self._open: OrderedDict[int, weakref.ref[nn.Parameter]] = OrderedDict()
        # Modules and their parameters, not yet put away.
        self._fresh: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Parameter]]] = []
        self._handles: list[RemovableHandle] = []
        self._inside = False
        self._ranks = Ranks()
        self._attic: Attic | None = None
        self._heap = Heap()

    def __enter__(self) -> "Init":
        if self._handles:
            raise RuntimeError("this Init is already in use: make another one")
        self._ranks = Ranks.of_process()
        self._attic = Attic(self.folder)
        self._handles = [
            register_module_parameter_registration_hook(self._parameter_registered),
            register_module_module_registration_hook(self._child_finished),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles = []
        try:
            left = [*self._open.values(), *(ref for _, ref in self._fresh)]
            self._open.clear()
            if kind is None:
                self._put_away_all(parameter for ref in left if (parameter := ref()) is not None)
        finally:
            self._fresh.clear()
            self._ranks.close()
            self._heap.give_back()

    def materialize(self, model: nn.Module, reset: Callable[[nn.Module], None] | None = None) -> nn.Module:
        """Give values to a model that was built on the meta device, module by module in ``model.modules()`` order; inside
        the block. ``reset`` gives a module's own parameters and buffers their values (default: its ``reset_parameters``).

        The values are those of an ordinary build where that draws them in the same order. Ties stay. Raises TypeError,
        naming them, for modules that have meta tensors and no ``reset_parameters``; nothing is changed then.
        """
        if not self._handles:
            raise RuntimeError("materialize() wants to be called inside the Init block")
        parts = {name: part for name, part in model.named_modules() if any(t.is_meta for t in _own_tensors(part))}
        lacking = [f"{name} ({type(part).__name__})" for name, part in parts.items() if not hasattr(part, RESET)]
        if reset is None and lacking:
            raise TypeError(f"{', '.join(lacking)}: no {RESET}(). Pass reset=, which gives a module its values")
        made: dict[int, nn.Parameter] = {}
        for part in parts.values():
            fresh = self._allocate(part, made)
            if fresh:
                reset(part) if reset is not None else getattr(part, RESET)()
                self._put_away_all(part.parameters(recurse=False))
        return model

    @staticmethod
    def _allocate(part: nn.Module, made: dict[int, nn.Parameter]) -> bool:
        """Memory for a module's own meta tensors; False when all it had were ties to what others have already."""
        fresh = False
        for name, parameter in part._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            known = made.get(id(parameter))
            if known is None:
                fresh = True
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                known = made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            part._parameters[name] = known
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                fresh = True
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        return fresh

    # -- while modules are built ---------------------------------------------------------------------------------------

    def _parameter_registered(self, module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None:
            return
        still = []
        for owner, ref in self._fresh:
            other = ref()
            if other is None or is_away(other):
                continue
            if owner() is module or not _can_leave(other) or self._is_shared(other):
                still.append((owner, ref))
            else:
                self._put_away_all(iter((other,)))
        self._fresh = [*still, (weakref.ref(module), weakref.ref(parameter))]

    def _child_finished(self, _module: nn.Module, _name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._put_away_all(child.parameters())

    def _is_shared(self, parameter: nn.Parameter) -> bool:
        """Whether another tensor lies over its memory on any rank. Collective; see [Note: shared on one rank]."""
        return self._ranks.union([not only_user(parameter)], "agreeing on what leaves memory under Init")[0]

    def _put_away_all(self, parameters: Iterator[nn.Parameter]) -> None:
        for parameter in parameters:
            record = record_of(parameter)
            if _can_leave(parameter) if record is None else record.open and id(parameter) not in self._open:
                self._put_away(parameter)

    def _put_away(self, parameter: nn.Parameter) -> None:
        if self._attic is None:
            raise RuntimeError("Init was not entered")
        before, self._inside = self._inside, True
        try:
            put_away(parameter, self._attic, self._ranks)
            self._heap.freed(parameter.numel() * parameter.itemsize)
        finally:
            self._inside = before

    # -- while finished modules are used -------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        getter = func.__self__.__name__ if name in ("__get__", "__set__") else ""
        if name == "__set__":
            result = func(*args, **kwargs)
            if getter == "data" and (record := record_of(args[0])) is not None:
                record.open = True  # what was assigned counts
                self._note_open(args[0])
            return result
        if name == "__get__" and getter not in READING_GETTERS:
            return func(*args, **kwargs)
        used = [value for value in _parameters_in((*args, *kwargs.values())) if record_of(value) is not None]
        for parameter in used:
            self._bring_back(parameter)
        result = func(*args, **kwargs)
        if used:
            self._close_old(keep={id(parameter) for parameter in used})
        return result

    def _bring_back(self, parameter: nn.Parameter) -> None:
        if is_away(parameter):
            self._inside = True
            try:
                bring_back(parameter, self._ranks)
            finally:
                self._inside = False
        self._note_open(parameter)

    def _note_open(self, parameter: nn.Parameter) -> None:
        self._open[id(parameter)] = weakref.ref(parameter)
        self._open.move_to_end(id(parameter))

    def _close_old(self, keep: set[int]) -> None:
        """Put away the longest unused until the rest is within the limit; not those that others share memory with."""
        total = sum(p.numel() * p.itemsize for ref in self._open.values() if (p := ref()) is not None)
        for key in [key for key in self._open if key not in keep]:
            if total <= self._open_bytes:
                return
            parameter = self._open[key]()
            if parameter is None:
                del self._open[key]
            elif not self._is_shared(parameter):
                total -= parameter.numel() * parameter.itemsize
                del self._open[key]
                self._put_away(parameter)


def _own_tensors(part: nn.Module) -> Iterator[torch.Tensor]:
    yield from part.parameters(recurse=False)
    yield from part.buffers(recurse=False)


def _can_leave(parameter: nn.Parameter) -> bool:
    """Integers have no NaN to stand for them; what is on meta has no values yet."""
    return (parameter.is_floating_point() or parameter.is_complex()) and parameter.device.type == "cpu"


def _parameters_in(values: Sequence[Any]) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _parameters_in(value)
        elif isinstance(value, nn.Parameter):
            yield value


def _first_nvme_path(config: Any) -> str | None:
    """The folder that the config's parameters go to, when it names one: the same keys as the engine reads."""
    if isinstance(config, str | os.PathLike):
        with open(config, encoding="utf-8") as file:
            config = json.load(file)
    if not isinstance(config, Mapping):
        paths = getattr(config, "nvme_paths", None)
        return str(paths[0].path) if paths else None
    listed = (config.get("tiers") or {}).get("nvme") or []
    if listed:
        return os.path.abspath(str(listed[0]["path"] if isinstance(listed[0], Mapping) else listed[0]))
    zero = config.get("zero_optimization") or {}
    for name in ("offload_param", "offload_optimizer"):
        block = zero.get(name) or {}
        if block.get("device") == "nvme" and block.get("nvme_path"):
            return os.path.abspath(str(block["nvme_path"]))
    return None
