"""Bytes written to and read from each path, since start and in the current step: what wears a disk out."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PathWear:
    """Counters of one path, in bytes. device: "major:minor" of the file system it lies on."""

    path: str
    device: str
    written: int
    read: int
    step_written: int
    step_read: int

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Wear:
    """Counts per path. Thread safe."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)
        self._written = [0] * len(paths)
        self._read = [0] * len(paths)
        self._written_before = [0] * len(paths)
        self._read_before = [0] * len(paths)
        self._lock = threading.Lock()

    def count_written(self, index: int, nbytes: int) -> None:
        """nbytes were handed to the disk of a path."""
        with self._lock:
            self._written[index] += nbytes

    def count_read(self, index: int, nbytes: int) -> None:
        """nbytes were asked of the disk of a path."""
        with self._lock:
            self._read[index] += nbytes

    def start_step(self) -> None:
        """The step's counters start at 0 again."""
        with self._lock:
            self._written_before = list(self._written)
            self._read_before = list(self._read)

    def report(self) -> list[PathWear]:
        """One entry per path."""
        with self._lock:
            return [
                PathWear(
                    path=path,
                    device=device_of(path),
                    written=self._written[index],
                    read=self._read[index],
                    step_written=self._written[index] - self._written_before[index],
                    step_read=self._read[index] - self._read_before[index],
                )
                for index, path in enumerate(self._paths)
            ]


def written_by_device(report: Sequence[PathWear]) -> dict[str, int]:
    """Bytes written since start per device ("major:minor"), of all paths on it: what wears it out."""
    written: dict[str, int] = {}
    for wear in report:
        written[wear.device] = written.get(wear.device, 0) + wear.written
    return written


def device_of(path: str) -> str:
    """ "major:minor" of the device under a path, or "" when the path is gone."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ""
    return f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
