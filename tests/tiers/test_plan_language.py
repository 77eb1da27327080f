"""Plans print and parse back; what is no action is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.tiers import Action, Verb, format_plan, parse_plan

actions = st.builds(
    lambda verb, group, detail: Action(verb, group, detail if group >= 0 else -1),
    st.sampled_from(list(Verb)),
    st.integers(-1, 5000),
    st.integers(-1, 5000),
)


@given(st.lists(actions))
def test_a_plan_survives_printing_and_parsing(plan: list[Action]) -> None:
    assert parse_plan(format_plan(plan)) == plan


@pytest.mark.parametrize("line", ["FETCHED 3", "FETCH three", "FETCH 3 0 1", "FETCH -2"])
def test_a_wrong_line_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=line):
        parse_plan(f"FETCH 1\n{line}")
