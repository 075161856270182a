"""Replaying is applying: what a journal holds makes of a new state, event by event, what the live one was."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings

from april.rollout.events import Stepped
from april.rollout.journal.journal import Journal
from april.rollout.scheduler import RolloutScheduler
from april.rollout.state import RolloutState
from tests.rollout.test_episodes import SCHEDULES, run, scheduled


def saved(state: RolloutState) -> Any:
    return json.loads(json.dumps(state.state_dict()))


@given(SCHEDULES)
@settings(max_examples=6, deadline=None)
def test_replay_restores_the_state_at_any_kill(s: dict[str, Any]) -> None:
    """Tokens of policies and of environments, rewards, steps and updates alike: the journal is cut at every event, and
    compared wherever the live run looked at itself."""
    live: dict[int, Any] = {}

    def look(rollouts: RolloutScheduler) -> None:
        assert rollouts.journal is not None
        live[rollouts.journal.position] = saved(rollouts.state)

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        journal = Journal(path, flush_seconds=0)
        asyncio.run(run(scheduled(s, journal=journal, on_progress=look), 4))
        journal.close()

        journal, state, compared, stepped = Journal(path), scheduled(s).state, 0, 0
        journal.seek(None)
        for event in journal.replay():
            state.apply(event)
            stepped += isinstance(event, Stepped)
            if journal.position in live:
                assert saved(state) == live[journal.position]
                compared += 1
        journal.close()
    assert compared == len(live)
    assert stepped, "environments put tokens in"
