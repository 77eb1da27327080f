"""The pipes of a child process."""

from typing import IO


def opened(pipe: IO[str] | None) -> IO[str]:
    """The pipe, which its Popen may lack. Raises ValueError then."""
    if pipe is None:
        raise ValueError("the process was started without pipes")
    return pipe
