"""Profiles on disk: strict reading, atomic writing, and where they lie."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import stat
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .device_identity import DeviceIdentity
from .profile import (
    FORMAT,
    MAX_AGE_S,
    ForeignProfileError,
    Profile,
    ProfileError,
    check_profile,
    identities_of,
    remeasure,
    this_kernel,
    today,
)

MAX_BYTES = 1 << 20


def cache_folder() -> Path:
    """lamina's folder in the user's cache: $XDG_CACHE_HOME/lamina, or ~/.cache/lamina.

    Raises ProfileError when the user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the variable's specification says that a relative path is to be ignored
        return Path(base) / "lamina"
    try:
        return Path.home() / ".cache" / "lamina"
    except RuntimeError as error:
        raise ProfileError("user without a home folder: set XDG_CACHE_HOME, or name the profile's file") from error


def profile_path(identities: Sequence[DeviceIdentity], *, folder: Path | None = None) -> Path:
    """The file for this set of devices, in whatever order they are given."""
    keys = sorted({identity.key() for identity in identities})
    name = keys[0] if len(keys) == 1 else hashlib.sha256(" ".join(keys).encode()).hexdigest()[:16]
    return (cache_folder() if folder is None else folder) / f"nvme-{name}.json"


def save_profile(profile: Profile, file: str | os.PathLike[str] | None = None) -> Path:
    """Write a profile whole or not at all, readable by its owner only; returns where it lies.

    `file` None: the user's cache folder, under the devices' name. Raises OSError.
    """
    target = profile_path(profile.identities) if file is None else Path(file).absolute()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(profile), indent=1, allow_nan=False) + "\n"
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    return target


def read_profile(file: str | os.PathLike[str]) -> Profile:
    """Read a profile strictly, without asking whether it fits this machine.

    Raises FileNotFoundError and other OSErrors; ForeignProfileError for another layout of keys; ProfileError for what is
    not a profile at all.
    """
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as source:
        status = os.fstat(source.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise ProfileError(f"{file} is no profile: not a regular file of at most {MAX_BYTES} bytes")
        raw = source.read(MAX_BYTES)
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{file} is no profile: not JSON ({error})") from error
    if not isinstance(data, dict) or "format" not in data:
        raise ProfileError(f"{file} is no profile: it has no key 'format'")
    if data["format"] != FORMAT:
        raise ForeignProfileError(
            f"{file} is laid out in format {data['format']!r}, this lamina reads {FORMAT}: run `lamina nvme` again"
        )
    try:
        profile = _build(Profile, data, "")
    except ProfileError as error:
        raise type(error)(f"{file}: {error}") from error
    return typing.cast(Profile, profile)


def load_profile(
    paths: Sequence[str | os.PathLike[str]],
    *,
    file: str | os.PathLike[str] | None = None,
    now: float | None = None,
    max_age_s: float = MAX_AGE_S,
) -> Profile:
    """The profile of the disks under `paths`, from `file` or the user's cache folder.

    Raises ProfileError when there is none that can be read, ForeignProfileError and StaleProfileError when it must not be used.
    """
    identities = identities_of(paths)
    source = profile_path(list(identities.values())) if file is None else Path(file)
    try:
        profile = read_profile(source)
    except FileNotFoundError as error:
        raise ProfileError(f"no profile {source}. Run `{remeasure(paths)}`") from error
    except OSError as error:  # no right to read it, a file where the cache folder should be
        raise ProfileError(
            f"{source} cannot be read: {error.strerror}. Mend that, then run `{remeasure(paths)}`"
        ) from error
    check_profile(
        profile,
        identities,
        now=today() if now is None else now,
        kernel=this_kernel(),
        max_age_s=max_age_s,
        source=str(source),
    )
    return profile


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value`, plain JSON data, as the type `kind`: dataclasses, tuples of one type, unions with None, scalars."""
    name = where or "the profile"
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _build(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ForeignProfileError(f"{name}: want a list, got {type(value).__name__}")
        return tuple(_build(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if type(value) is not kind or kind is float:
        raise ForeignProfileError(f"{name}: want {kind.__name__}, got {value!r}")
    return value


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    name = where or "the profile"
    if not isinstance(value, dict):
        raise ForeignProfileError(f"{name}: want an object, got {type(value).__name__}")
    hints = typing.get_type_hints(kind)
    for what, keys in (("unknown", set(value) - set(hints)), ("missing", set(hints) - set(value))):
        if keys:
            raise ForeignProfileError(f"{name}: {what} {', '.join(sorted(keys))}: another layout of keys")
    inner = {key: _build(hints[key], value[key], f"{where}.{key}" if where else key) for key in hints}
    try:
        return kind(**inner)
    except ProfileError as error:
        raise ProfileError(f"{name}: {error}") from error
