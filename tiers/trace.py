"""The access trace: in which order a step uses its groups, and for how long each use computes.

Pure data. The first step records it; every later step walks along it and says when it deviates.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Access:
    """One use of a group: its index, and the seconds of compute until the next use (0 when not yet known)."""

    group: int
    compute_s: float = 0.0


@dataclass(kw_only=True)
class TraceCursor:
    """Records the first step, then follows it.

    ``observe(group)`` is called at every access. While recording it appends. While following it advances along
    the recorded order; an access that is not the expected one makes the step *deviant*: the cursor looks for the
    group further on and goes on from there, or, where the step has no such use left, stays where it is (the caller
    fetches on demand either way). A deviant step is recorded beside the old trace and replaces it when the next
    step deviates too, so that one odd step (an evaluation, a skipped layer) does not throw the trace away.
    """

    recorded: list[Access] = field(default_factory=list)
    position: int = -1
    deviant: bool = False
    _this_step: list[Access] = field(default_factory=list)
    _deviant_steps: int = 0

    @property
    def known(self) -> bool:
        return bool(self.recorded)

    def observe(self, group: int, compute_s: float = 0.0) -> None:
        """Note the use of ``group``; ``compute_s`` is the time that the access before it computed."""
        if self._this_step:
            before = self._this_step[-1]
            self._this_step[-1] = Access(group=before.group, compute_s=compute_s)
        self._this_step.append(Access(group=group))
        if not self.recorded:
            return
        expected = self.position + 1
        if expected < len(self.recorded) and self.recorded[expected].group == group:
            self.position = expected
            return
        self.deviant = True
        for index in range(expected, len(self.recorded)):
            if self.recorded[index].group == group:
                self.position = index
                return

    def end_step(self) -> None:
        """Close the step: adopt what was recorded when there is no trace yet or two steps in a row deviated."""
        short = self.position + 1 < len(self.recorded)
        if not self.recorded:
            self.recorded = self._this_step
        elif self.deviant or (short and self._this_step):
            self._deviant_steps += 1
            if self._deviant_steps >= 2:
                self.recorded = self._this_step
                self._deviant_steps = 0
        else:
            self._deviant_steps = 0
            self.recorded = self._this_step or self.recorded
        self._this_step = []
        self.position = -1
        self.deviant = False

    def upcoming(self, limit: int) -> list[int]:
        """Groups of the next ``limit`` accesses, going round into the next step after the last one."""
        if not self.recorded:
            return []
        length = len(self.recorded)
        count = min(limit, length)
        return [self.recorded[(self.position + 1 + ahead) % length].group for ahead in range(count)]
