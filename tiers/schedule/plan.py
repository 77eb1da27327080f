"""Plans are data: a list of actions that prints as short lines and parses back."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Verb(enum.StrEnum):
    """What the executor can be told to do."""

    FETCH = "FETCH"  # bring a group's parameters into the device tier
    EVICT = "EVICT"  # drop the device tier's copy of a group (its home still holds it)
    RELEASE = "RELEASE"  # a use of the group has ended
    UPDATE = "UPDATE"  # run the optimizer on a sub-group
    WRITE = "WRITE"  # write a sub-group into the next generation
    COMMIT = "COMMIT"  # make the next generation current
    DROP = "DROP"  # forget an uncommitted (speculative) generation


@dataclass(frozen=True)
class Action:
    """One action on one group; ``detail`` is a sub-group index for UPDATE and WRITE, else -1."""

    verb: Verb
    group: int = -1
    detail: int = -1

    def __str__(self) -> str:
        words = [self.verb.value]
        if self.group >= 0:
            words.append(str(self.group))
        if self.detail >= 0:
            words.append(str(self.detail))
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read one printed action; raises ValueError naming the line."""
        words = text.split()
        try:
            verb = Verb(words[0])
            numbers = [int(word) for word in words[1:]]
        except (IndexError, ValueError):
            raise ValueError(f"not an action: {text!r} (wanted e.g. 'FETCH 3' or 'UPDATE 3 0')") from None
        if len(numbers) > 2 or any(number < 0 for number in numbers):
            raise ValueError(f"not an action: {text!r} (at most a group and a sub-group, both >= 0)")
        return cls(verb, *numbers)


def format_plan(actions: Iterable[Action]) -> str:
    return "\n".join(str(action) for action in actions)


def parse_plan(text: str) -> list[Action]:
    return [Action.parse(line) for line in text.splitlines() if line.strip()]
