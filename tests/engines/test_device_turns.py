"""Transitions of an engine that shares devices with the trainer."""

from __future__ import annotations

import pytest

from april.engines.device_turns import NEXT, DeviceTurns, TurnState


@pytest.mark.parametrize("start", TurnState)
@pytest.mark.parametrize("state", TurnState)
def test_only_the_next_state_can_follow(start: TurnState, state: TurnState) -> None:
    turns = DeviceTurns()
    turns.state = start
    if NEXT[start] is state:
        with turns.to(state):
            assert turns.state is start
        assert turns.state is state
    else:
        with pytest.raises(AssertionError, match=f"is {start.value} cannot become {state.value}"), turns.to(state):
            pass
        assert turns.state is start


def test_a_failed_transition_leaves_the_state_and_is_not_recorded() -> None:
    times = iter(range(10))
    turns = DeviceTurns(lambda: float(next(times)))
    with turns.to(TurnState.INTERRUPTED):
        pass
    with pytest.raises(OSError, match="no"), turns.to(TurnState.ASLEEP):
        raise OSError("no")
    assert turns.state is TurnState.INTERRUPTED
    assert turns.take() == [(TurnState.INTERRUPTED, 0.0, 1.0)]
    assert turns.take() == []
    turns.restarted()
    assert turns.serving
