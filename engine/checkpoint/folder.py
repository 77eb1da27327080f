"""A checkpoint's folder: written beside its final name and renamed as a whole; `latest`; leftovers; how many are kept.

[Note: atomic checkpoints]
    <dir>/.<tag>.partial-<random>/    while it is written; removed by the next save when its process is gone
    <dir>/<tag>/                      complete: checkpoint.json, rank<r>/state.json, rank<r>/planes.bin, rank<r>/nvme/…
    <dir>/.<tag>.replaced-<random>/   what had that name before, until the new one has it; found by a load that comes between
    <dir>/.<tag>.removed-<random>/    what is being deleted; finished by the next save
    <dir>/latest                      the tag, replaced by a rename
Every file and folder is durable before the rename that makes it count.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lamina.aio_native import crc32c
from lamina.tiers import IntegrityError
from lamina.tiers.nvme.folder import sync_directory

from .deepspeed import refuse_deepspeed

FORMAT = "lamina checkpoint"
VERSION = 1
MAIN_FILE = "checkpoint.json"
RANK_FILE = "state.json"
LATEST = "latest"
_LATEST_TEMPORARY = f".{LATEST}.tmp"
_OWNER_FILE = "writer.json"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")
_PARTIAL = re.compile(r"\.(?P<tag>.+)\.partial-[0-9a-f]{8}")
_REMOVED = re.compile(r"\.(?P<tag>.+)\.removed-[0-9a-f]{8}")
_REPLACED = re.compile(r"\.(?P<tag>.+)\.replaced-[0-9a-f]{8}")


def checked_tag(tag: str | int) -> str:
    """The tag as a folder name. Raises ValueError when it cannot be one."""
    name = str(tag)
    if not _TAG.fullmatch(name) or name == LATEST:
        raise ValueError(
            f"tag {name!r}: want a folder name of 1 to 200 letters, digits, '.', '_', '=', '+' or '-' that does not start "
            f"with '.', and is not {LATEST!r}"
        )
    return name


# -- JSON files with a checksum ----------------------------------------------------------------------------------------


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """A new file of two lines: the content, and the checksum of the first. The caller makes it durable."""
    line = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(line + b"\n" + json.dumps({"crc32c": crc32c(line)}).encode() + b"\n")


def read_json(path: str) -> dict[str, Any]:
    """Raises IntegrityError for a missing or damaged file."""
    try:
        with open(path, "rb") as file:
            line, _, rest = file.read().partition(b"\n")
    except OSError as error:
        raise IntegrityError(
            f"{path} cannot be read: {error.strerror}. The checkpoint is incomplete, load another one", path=path
        ) from error
    try:
        wanted = int(json.loads(rest)["crc32c"])
        found = crc32c(line)
        if wanted != found:
            raise IntegrityError(
                f"{path} is damaged: CRC32C expected {wanted:08x}, found {found:08x}. Load another checkpoint",
                path=path,
                expected=wanted,
                found=found,
            )
        content = json.loads(line)
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path} is damaged: {error}. Load another checkpoint", path=path) from error
    if not isinstance(content, dict):
        raise IntegrityError(f"{path} holds no object. Load another checkpoint", path=path)
    return content


# -- writing -----------------------------------------------------------------------------------------------------------


def begin(save_dir: str, tag: str) -> str:
    """Make the folder in which a checkpoint is written, and remove what dead processes left. Raises OSError."""
    os.makedirs(save_dir, exist_ok=True)
    remove_leftovers(save_dir)
    path = os.path.join(save_dir, f".{tag}.partial-{secrets.token_hex(4)}")
    os.mkdir(path, 0o700)
    with open(os.path.join(path, _OWNER_FILE), "x", encoding="utf-8") as file:
        json.dump({"host": os.uname().nodename, "pid": os.getpid(), "started": _start_of(os.getpid())}, file)
    return path


def finish(partial: str, save_dir: str, tag: str, *, latest: bool) -> str:
    """Give a complete folder, all of it durable, its name, and point `latest` (made by prepare_latest()) to it."""
    path = os.path.join(save_dir, tag)
    replaced = None
    if os.path.lexists(path):
        if not is_checkpoint(path):
            raise FileExistsError(f"{path} is there and is no checkpoint of ours: use another tag")
        replaced = os.path.join(save_dir, f".{tag}.replaced-{secrets.token_hex(4)}")
        os.rename(path, replaced)
    os.rename(partial, path)
    sync_directory(save_dir)
    if latest:
        os.rename(os.path.join(save_dir, _LATEST_TEMPORARY), os.path.join(save_dir, LATEST))
        sync_directory(save_dir)
    os.unlink(os.path.join(path, _OWNER_FILE))
    if replaced is not None:
        remove_checkpoint(replaced)
    remove_leftovers(save_dir)
    return path


def prepare_latest(save_dir: str, tag: str) -> str:
    """Write what `latest` is to say beside it, under one name that the next save writes over; the caller makes it durable."""
    temporary = os.path.join(save_dir, _LATEST_TEMPORARY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(tag)
    return temporary


def abandon(partial: str) -> None:
    """Remove a folder that was not finished, and what `latest` would have said."""
    shutil.rmtree(partial, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(os.path.dirname(partial), _LATEST_TEMPORARY))


def remove_leftovers(save_dir: str) -> None:
    """Remove partial folders of processes of this machine that are gone, replaced ones whose successor is there, and what
    was left of a removal."""
    for name in os.listdir(save_dir):
        path = os.path.join(save_dir, name)
        if os.path.islink(path) or not os.path.isdir(path):
            continue
        if _PARTIAL.fullmatch(name) and not _is_alive(path):
            shutil.rmtree(path)
        elif (match := _REPLACED.fullmatch(name)) and is_checkpoint(os.path.join(save_dir, match["tag"])):
            remove_checkpoint(path)
        elif match := _REMOVED.fullmatch(name):
            _empty(path, os.path.join(save_dir, match["tag"]))


def _is_alive(partial: str) -> bool:
    """Whether the process that writes the folder may still run; a folder of another machine is left alone."""
    try:
        with open(os.path.join(partial, _OWNER_FILE), encoding="utf-8") as file:
            owner = json.load(file)
        if owner["host"] != os.uname().nodename:
            return True
        return bool(_start_of(int(owner["pid"])) == owner["started"])
    except FileNotFoundError:
        # Complete but not renamed yet, or killed right after mkdir: nobody but a live process could go on.
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _start_of(pid: int) -> str | None:
    """When the process was started, in ticks since the boot; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


# -- what is there -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Found:
    """A complete checkpoint."""

    tag: str
    path: str
    serial: tuple[int, float]  # steps, seconds: the order of age


def is_checkpoint(path: str) -> bool:
    """Whether a complete checkpoint of ours lies there."""
    return os.path.isfile(os.path.join(path, MAIN_FILE)) and not os.path.islink(path)


def checkpoints(save_dir: str) -> Iterator[Found]:
    """Complete checkpoints in a folder; damaged ones are left out."""
    for name in sorted(os.listdir(save_dir)):
        path = os.path.join(save_dir, name)
        if not _TAG.fullmatch(name) or not is_checkpoint(path):
            continue
        try:
            main = read_json(os.path.join(path, MAIN_FILE))
            yield Found(tag=name, path=path, serial=(int(main["global_steps"]), float(main["saved_at"])))
        except (IntegrityError, KeyError, ValueError, TypeError):
            continue


def keep_last(save_dir: str, count: int, *, current: str) -> list[str]:
    """Remove all but the newest ``count`` checkpoints, never that of tag ``current``; the tags that are gone."""
    if count < 1:
        raise ValueError(f"keep_last is {count}: want at least 1")
    found = sorted(checkpoints(save_dir), key=lambda one: (one.tag == current, one.serial[1]))
    gone = []
    for one in found[: max(0, len(found) - count)]:
        remove_checkpoint(one.path)
        gone.append(one.tag)
    return gone


def remove_checkpoint(path: str) -> None:
    """Delete a checkpoint. It goes under another name first, so that what a crash leaves is neither taken for one nor in the
    way of the next one of its tag."""
    save_dir, name = os.path.split(path)
    match = _REPLACED.fullmatch(name)
    tag = match["tag"] if match else name
    removed = os.path.join(save_dir, f".{tag}.removed-{secrets.token_hex(4)}")
    os.rename(path, removed)
    sync_directory(save_dir)
    _empty(removed, os.path.join(save_dir, tag))


def _empty(removed: str, path: str) -> None:
    """Delete our files of a checkpoint that is being removed; what somebody else put there stays, under its old name."""
    for name in os.listdir(removed):
        inner = os.path.join(removed, name)
        if re.fullmatch(r"rank\d+", name) and os.path.isdir(inner) and not os.path.islink(inner):
            shutil.rmtree(inner)
        elif name in (MAIN_FILE, _OWNER_FILE) or re.fullmatch(r"[A-Za-z_]+\.safetensors", name):
            os.unlink(inner)
    if not os.listdir(removed):
        os.rmdir(removed)
    elif not os.path.lexists(path):
        os.rename(removed, path)


def locate(load_dir: str, tag: str | int | None) -> str | None:
    """The folder of a tag, or of the one that `latest` names; None when there is no `latest`.

    Raises FileNotFoundError naming what is there instead, DeepSpeedCheckpointError for what DeepSpeed wrote.
    """
    if tag is None:
        try:
            with open(os.path.join(load_dir, LATEST), encoding="utf-8") as file:
                tag = file.read().strip()
        except (FileNotFoundError, NotADirectoryError):
            refuse_deepspeed(load_dir)
            return None
    name = checked_tag(tag)
    path = os.path.join(load_dir, name)
    if is_checkpoint(path):
        return path
    if os.path.isdir(load_dir):
        for other in sorted(os.listdir(load_dir)):
            match = _REPLACED.fullmatch(other)
            if match and match["tag"] == name and is_checkpoint(os.path.join(load_dir, other)):
                return os.path.join(load_dir, other)
    refuse_deepspeed(load_dir, tag=name)
    there = ", ".join(one.tag for one in checkpoints(load_dir)) if os.path.isdir(load_dir) else ""
    raise FileNotFoundError(f"{path} holds no complete checkpoint; in {load_dir} there are: {there or 'none'}")
