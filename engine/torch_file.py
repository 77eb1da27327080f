"""A state dict that torch.save wrote (DeepSpeed's consolidated pytorch_model.bin, say), read by torch's restricted unpickler.

``weights_only`` builds tensors and plain containers and calls nothing else that a file names. The file is mapped, so that only
what is read is in memory.
"""

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_WRAPPERS = ("module", "state_dict", "model_state_dict")


class TorchSlice:
    """A tensor of the file; indexing reads it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self._tensor[rows]


class TorchFile:
    """The tensors of one file by name, with the methods of safetensors' open files.

    Raises ValueError, naming the file, for content that is no state dict or would need code to be run.
    """

    def __init__(self, path: str) -> None:
        content: Any
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path} holds more than tensors and plain containers, which is not loaded (its code would be run): "
                f"{str(error).splitlines()[0]}. Convert it to safetensors where it comes from"
            ) from error
        except RuntimeError as error:
            raise ValueError(
                f"{path} cannot be read: {str(error).splitlines()[0]} (wanted: what torch.save writes since 1.6)"
            ) from error
        self._tensors = dict(_tensors_in(content))
        if not self._tensors:
            raise ValueError(
                f"{path} holds no state dict: want names with their tensors, at its top or under {_WRAPPERS}"
            )

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, key: str) -> TorchSlice:
        return TorchSlice(self._tensors[key])

    def get_tensor(self, key: str) -> torch.Tensor:
        return self._tensors[key]


def _tensors_in(content: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Those at the top, else those of the first mapping that a training framework wraps a state dict in."""
    if not isinstance(content, Mapping):
        return
    for wrapper in _WRAPPERS:
        if isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, torch.Tensor):
            yield name, value
