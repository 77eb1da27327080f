"""Knows a checkpoint of DeepSpeed by its files, and says how to go on from it.

Its states are pickles, of classes of its own in part, cut by the rules of its own stages; they are not read here. What it writes
in other people's formats (whole weights) is.
"""

import os
import re
from collections.abc import Iterator

SCRIPT = "zero_to_fp32.py"
"""DeepSpeed puts this beside what it saves: it makes whole weights of the parts."""
_STATES = re.compile(r".+[_-](model|optim)_states\.pt")
_PARTS = re.compile(r"(.*zero_pp_rank_.+_model_states|.+_optim_states|layer_.+[_-]model_states)\.pt")
"""Those that are no use alone: of stage 3, of a pipeline, of experts, and all of the optimizer."""
_UNIVERSAL = "latest_universal"


class DeepSpeedCheckpointError(ValueError):
    """A checkpoint that DeepSpeed wrote: the message says what to do."""


def refuse_deepspeed(path: str | os.PathLike[str], *, tag: str | int | None = None) -> None:
    """Raise DeepSpeedCheckpointError when ``path`` or its folder of that tag (without one, any folder in it) holds DeepSpeed's
    states, or when it is a file with a part of them. Else nothing."""
    root = os.fspath(path)
    if os.path.isfile(root):
        if _PARTS.fullmatch(os.path.basename(root)):
            raise DeepSpeedCheckpointError(_advice(os.path.dirname(root) or ".", [os.path.basename(root)]))
        return
    for folder in _candidates(root, tag):
        files = sorted(name for name in _names(folder) if _STATES.fullmatch(name))
        if files or _UNIVERSAL in _names(folder):
            raise DeepSpeedCheckpointError(_advice(folder, files or [_UNIVERSAL]))


def _candidates(root: str, tag: str | int | None) -> Iterator[str]:
    yield root
    if tag is not None:
        yield os.path.join(root, str(tag))
        return
    yield from (inner for name in sorted(_names(root)) if os.path.isdir(inner := os.path.join(root, name)))


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _advice(folder: str, files: list[str]) -> str:
    named = f"{', '.join(files[:2])}{', …' if len(files) > 2 else ''}"
    above = os.path.dirname(os.path.abspath(folder))
    script = next((where for where in (folder, above) if SCRIPT in _names(where)), None)
    whole = [name for name in files if not _PARTS.fullmatch(name)]
    if whole and len(whole) == len(files):
        step = f"engine.load_pretrained({os.path.join(folder, whole[0])!r}) reads the whole weights in it"
    else:
        command = f"python {os.path.join(script, SCRIPT)} {script}" if script else f"{SCRIPT} CHECKPOINT_FOLDER"
        step = (
            f"make whole weights of it where DeepSpeed is installed (`{command} OUT`, or its save_16bit_model), then "
            f"engine.load_pretrained('OUT')"
        )
    return (
        f"{folder} was written by DeepSpeed ({named}), whose states are not read here: {step}. Moments, step counts and the "
        f"schedule start anew"
    )
