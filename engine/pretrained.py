"""Takes weights from safetensors files, or state dicts of torch, into an engine, range by range: no whole copy in memory."""

import json
import os
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import nn

from lamina.tiers import Plane
from lamina.zero import ZeroRuntime
from lamina.zero.checkpoint.part import LoadedState, load_source

from .checkpoint.deepspeed import refuse_deepspeed
from .checkpoint.loading import LoadReport
from .torch_file import TorchFile
from .weight_names import weights_of

_KINDS = (".safetensors", ".bin")


class WeightSource:
    """Parameters in one or several files, by any of their names. Context manager."""

    def __init__(self, folder: str, module: nn.Module) -> None:
        self._closing = ExitStack()
        self._files: dict[str, Any] = {}
        for path in weight_files(folder):
            file = self._opened(path)
            self._files |= dict.fromkeys(file.keys(), file)
        self.taken: set[str] = set()
        self._prefix = self._common_prefix(module)
        self._key: dict[str, str] = {}
        for weight in weights_of(module):
            for name in (weight.name, *weight.aliases):
                key = self._prefixed(name)
                if key in self._files:
                    for alias in (weight.name, *weight.aliases):
                        self._key.setdefault(alias, key)
                    self.taken.add(key)

    def _opened(self, path: str) -> Any:
        if path.endswith(".safetensors"):
            return self._closing.enter_context(safe_open(path, framework="pt"))
        return TorchFile(path)

    def _common_prefix(self, module: nn.Module) -> str:
        """What transformers puts before, or leaves out of, the names of a base model ("transformer.", "model.")."""
        base = getattr(module, "base_model_prefix", "")
        names = [weight.name for weight in weights_of(module)]
        if not base or any(name in self._files for name in names):
            return ""
        if any(f"{base}.{name}" in self._files for name in names):
            return f"+{base}."
        return f"-{base}." if any(name.removeprefix(f"{base}.") in self._files for name in names) else ""

    def _prefixed(self, name: str) -> str:
        if self._prefix.startswith("+"):
            return self._prefix[1:] + name
        return name.removeprefix(self._prefix[1:]) if self._prefix else name

    @property
    def unexpected(self) -> list[str]:
        """Names in the files that the module does not have."""
        return sorted(self._files.keys() - self.taken)

    def has(self, name: str) -> bool:
        return name in self._key

    def shape(self, name: str) -> tuple[int, ...]:
        key = self._key[name]
        return tuple(self._files[key].get_slice(key).get_shape())

    def master(self, name: str, first: int, last: int) -> torch.Tensor:
        """Reads only the rows that hold elements [first, last)."""
        key = self._key[name]
        shape = self.shape(name)
        if len(shape) < 2 or shape[0] == 0:
            whole: torch.Tensor = self._files[key].get_tensor(key)
            return whole.reshape(-1)[first:last]
        row = 1
        for length in shape[1:]:
            row *= length
        begin, end = first // row, -(-last // row)
        rows: torch.Tensor = self._files[key].get_slice(key)[begin:end]
        return rows.reshape(-1)[first - begin * row : last - begin * row]

    def tensor(self, name: str) -> torch.Tensor:
        """All of it."""
        key = self._key[name]
        whole: torch.Tensor = self._files[key].get_tensor(key)
        return whole

    def moment(self, name: str, plane: Plane, first: int, last: int) -> torch.Tensor | None:
        """Files of weights have none."""
        del name, plane, first, last
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()


def weight_files(folder: str) -> list[str]:
    """The files of a folder that hold its weights, safetensors if there are any (or the one file that is named).

    Raises FileNotFoundError naming what is missing, DeepSpeedCheckpointError for DeepSpeed's states, ValueError for an index that
    names a file elsewhere."""
    if os.path.isfile(folder):
        refuse_deepspeed(folder)
        return [folder]
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder} is no folder with weights")
    there = sorted(os.listdir(folder))
    for kind in _KINDS:
        for index in (name for name in there if name.endswith(f"{kind}.index.json")):
            with open(os.path.join(folder, index), encoding="utf-8") as file:
                names = sorted(set(json.load(file)["weight_map"].values()))
            for name in names:
                if os.path.basename(name) != name:
                    raise ValueError(f"{index} names {name!r}, which is outside of {folder}")
                if not os.path.isfile(os.path.join(folder, name)):
                    raise FileNotFoundError(f"{os.path.join(folder, name)} is missing, and {index} names it")
            return [os.path.join(folder, name) for name in names]
        wanted = (
            name for name in there if name.endswith(kind) and (kind == ".safetensors" or name == "pytorch_model.bin")
        )
        if files := [os.path.join(folder, name) for name in wanted]:
            return files
    refuse_deepspeed(folder)
    raise FileNotFoundError(f"{folder} has no .safetensors file and no pytorch_model.bin")


def load_pretrained(
    module: nn.Module, runtime: ZeroRuntime, load_dir: str | os.PathLike[str], *, strict: bool, step: int
) -> LoadReport:
    """Set every parameter and persistent buffer that the files have. Collective.

    ``load_dir``: a folder with safetensors files or pytorch_model.bin (with their index, where there are several), or a file.

    Raises FileNotFoundError, KeyError naming what is only here or only there (``strict``), ValueError for shapes that differ
    and for files that are not plain weights; nothing was changed then.
    """
    path = os.path.abspath(os.path.expanduser(os.fspath(load_dir)))
    buffers = {
        weight.name: weight.tensor for weight in weights_of(module) if not isinstance(weight.tensor, nn.Parameter)
    }
    with WeightSource(path, module) as source:
        lacking = [name for name in buffers if not source.has(name)]
        unexpected = source.unexpected
        if strict and (lacking or unexpected):
            raise KeyError(
                f"not in {path}: {', '.join(lacking) or 'none'}; not in the model: {', '.join(unexpected) or 'none'} "
                f"(strict=False loads the rest)"
            )
        loaded: LoadedState = load_source(runtime, source, step=step, strict=strict)
        with torch.no_grad():
            for name, buffer in buffers.items():
                if source.has(name):
                    buffer.copy_(source.tensor(name))
    return LoadReport(path=path, missing=(*loaded.missing, *lacking), unexpected=tuple(unexpected))
