"""What `lamina doctor` says: findings as plain data, and the way a check is carried out."""

import contextlib
import enum
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


class State(enum.StrEnum):
    """How good or bad it is."""

    OK = "ok"
    INFO = "info"
    """Neither good nor bad, or something optional that is not there."""
    WARN = "warn"
    """Works, but slower or with less than could be had."""
    FAIL = "fail"
    """Does not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    state: State
    text: str
    mend: str = ""
    """A command, or what to do; empty where nothing is to be mended."""

    def as_dict(self) -> dict[str, str]:
        """Plain data."""
        return {
            "section": self.section,
            "name": self.name,
            "state": self.state.value,
            "text": self.text,
            "mend": self.mend,
        }


Check = Callable[[], Iterable[Finding]]

EXPECTED = (OSError, ImportError, ValueError, RuntimeError, MemoryError, AttributeError)
"""What checks meet on broken machines: missing modules, refused calls, libraries of another version."""


def attempt(section: str, name: str, check: Check, *, mend: str = "") -> list[Finding]:
    """The findings of a check; a failure of the check itself is a finding too, never the end of the report."""
    found: list[Finding] = []
    try:
        with quiet():
            found.extend(check())
    except EXPECTED as error:
        text = f"{type(error).__name__}: {first_line(error)}"
        found.append(Finding(section=section, name=name, state=State.FAIL, text=text, mend=mend))
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of what is being tried: the findings say it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def worst(findings: Iterable[Finding]) -> State:
    """The worst state of all."""
    order = list(State)
    return max((finding.state for finding in findings), key=order.index, default=State.OK)
