"""Paths on the command line: the mistakes that a shell makes easy are refused before anything is done with them."""

import argparse
import os
from pathlib import Path


def folder_argument(text: str) -> Path:
    """A folder as argparse's `type`: not the empty string, which an unset variable leaves and which means the current one."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: is a variable of the shell unset? The current folder is .")
    return Path(text)


def check_target(option: str, file: Path) -> None:
    """Whether a file that is to be written at the end of a long run can be. Raises ValueError that names the option."""
    folder = file.absolute().parent
    if file.is_dir():
        raise ValueError(f"{option} {file}: is a folder, name a file")
    if not folder.is_dir():
        raise ValueError(f"{option} {file}: there is no folder {folder}")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ValueError(f"{option} {file}: user {os.geteuid()} cannot write there")
