"""The one error that the planner raises for a question it cannot answer."""


class PlanError(ValueError):
    """A question that cannot be answered: the message names the thing, the value and what to give instead."""
