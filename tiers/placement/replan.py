"""Plans anew when links turn out slower or faster than modelled. Pure: fed with measurements, asked for a decision."""

from dataclasses import dataclass, field, replace

from lamina.tiers.links.correction import Measured
from lamina.tiers.simulation.step_model import ComputeTimes

from .choice import Choice, choose
from .homes import PAGE, page_up
from .placement import Placement
from .question import PlacementQuestion

WORTH_MOVING = 0.05
"""A new placement must promise to make a step shorter by this share before anything is moved."""
WORTH_MOVING_AT_FIRST = 0.02
"""The same once the passes were measured: the first placement was made without knowing anything of them."""


@dataclass(frozen=True, kw_only=True)
class Revision:
    """What a change of a link's rates (or of the times of computing) means: the prediction for the placement that there is,
    and the better one, if any."""

    link: str
    """Empty when it was the times of computing that changed."""
    factor: float
    """How many times slower than first modelled the link counts as, for what a step now reads and writes."""
    factors: tuple[float, float] = (1.0, 1.0)
    """The same of its reads and of its writes."""
    expected_step_s: float
    """Under the present placement."""
    lower_bound_s: float
    better: Choice | None
    worth: float = WORTH_MOVING
    """By what share a step must become shorter."""

    def __str__(self) -> str:
        what = (
            f"{self.link} is {self.factor:.2f} times slower than first measured "
            f"(reads {self.factors[0]:.2f}, writes {self.factors[1]:.2f})"
            if self.link
            else "compute was measured"
        )
        told = f"{what}: a step now takes {self.expected_step_s:.3f} s, at best {self.lower_bound_s:.3f} s"
        if self.better is None:
            return f"{told}; the placement stays, since no other would be {self.worth:.0%} faster"
        return f"{told}; another placement would take {self.better.predicted.step_s:.3f} s"


@dataclass(kw_only=True)
class Replanner:
    """Keeps the model of the links up to date and says when that changes what is best.

    ``choice`` is the present one; the model of its question is corrected in place by what was measured.
    """

    choice: Choice
    revisions: list[Revision] = field(default_factory=list)

    def after_step(self, measured: Measured) -> Revision | None:
        """Take one step's measurement; a revision when the link's rates changed, else None."""
        question = self.choice.question
        if not question.links.observe(measured):
            return None
        return self._revise(question, measured.link)

    def with_times(self, times: ComputeTimes) -> Revision:
        """Reckon with these times of computing from now on."""
        before = self.choice.question.times
        known = any(before.forward_s) or any(before.backward_s)
        worth = WORTH_MOVING if known else WORTH_MOVING_AT_FIRST
        return self._revise(replace(self.choice.question, times=times), "", worth)

    def _revise(self, question: PlacementQuestion, link: str, worth: float = WORTH_MOVING) -> Revision:
        expected = question.predict(self.choice.placement)
        other = choose(question)
        gain = 1 - other.predicted.step_s / expected.step_s if expected.step_s else 0.0
        better = other if gain >= worth and other.placement.homes != self.choice.placement.homes else None
        self.choice = replace(self.choice, question=question, predicted=expected)
        revision = Revision(
            link=link,
            factor=question.links.factor(link) if link else 1.0,
            factors=question.links.factors(link) if link else (1.0, 1.0),
            expected_step_s=expected.step_s,
            lower_bound_s=expected.lower_bound_s,
            better=better,
            worth=worth,
        )
        self.revisions.append(revision)
        return revision

    def leave_room(self, nbytes: int) -> Choice | None:
        """Set so much host memory aside for saved inputs from now on, or what everything on the slowest tiers leaves. Where the
        present placement does not leave it, the one that moves least for that."""
        question = self.choice.question
        slow = question.placement_at(question.placer.slowest())
        if question.budgets.host_bytes is not None:
            left = question.budgets.host_bytes - slow.host_bytes + page_up(question.wishes.saved_input_bytes)
            nbytes = min(nbytes, max(left, 0) // PAGE * PAGE)
        question = replace(question, wishes=replace(question.wishes, saved_input_bytes=nbytes))
        present = question.placement_at(self.choice.placement.homes)
        self.choice = replace(self.choice, question=question)
        if question.placer.holds(present.homes):
            return None
        return Choice.given(question, _with_less(question, present))

    def adopt(self, better: Choice) -> None:
        """The state was moved: from now on this is the present placement."""
        self.choice = better


def _with_less(question: PlacementQuestion, present: Placement) -> Placement:
    """The present placement with less in memory, so that it holds: from the back of the model states on the slowest tier, then
    parameters. Where states may be divided, part of the last one that went stays."""
    placer, homes, gone = question.placer, dict(present.homes), []
    slowest = placer.slowest()
    movable = [index for index, s in enumerate(question.segments) if s.trained and not s.persistent]
    for state, index in [(state, index) for state in (True, False) for index in reversed(movable)]:
        if placer.holds(homes):
            break
        name = question.segments[index].name
        before, slow = homes[name], slowest[name]
        homes[name] = replace(before, state=slow.state, kept=0) if state else slow
        gone += [index] if homes[name] != before else []
    return placer.place_at(homes, divide=gone[-1:] if question.wishes.divide_state else ())
