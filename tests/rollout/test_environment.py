"""Answers that an environment may give, and their fingerprints."""

import json

import pytest

from april import EnvStep, TokenIds, Turn
from april.rollout.episodes.environment import ObservationError, checked, checked_observation, fingerprint


@pytest.mark.parametrize("observation", ["", "warmer", [], [{"role": "tool", "content": "3"}], TokenIds((1, 2))])
def test_text_messages_and_token_ids_are_observations(observation):
    checked_observation(observation)
    assert checked(EnvStep(observation, 1, True)) == EnvStep(observation, 1.0, True)


@pytest.mark.parametrize("said", ["x\ud83d", [{"role": "tool", "content": "x\ud83d"}]])
def test_halves_of_surrogate_pairs_are_replaced_so_that_every_tokenizer_reads_an_observation(said):
    whole = json.loads(json.dumps(said).replace("d83d", "fffd"))
    assert checked(EnvStep(said)).observation == checked_observation(said) == whole


@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        (None, "EnvStep"),
        (EnvStep(3), "must be text, a list of chat messages"),  # type: ignore[arg-type]
        (EnvStep((1, 2)), "april.TokenIds"),  # type: ignore[arg-type]
        (EnvStep(TokenIds((1, -2))), "no token id"),
        (EnvStep([{"content": "no role"}]), "must be text"),
        (EnvStep([{"role": "tool", "content": {1, 2}}]), "JSON"),
        (EnvStep("", float("nan")), "no finite number"),
        (EnvStep("", 0.0, False, {"seen": {1}}), "info must be JSON"),
    ],
)
def test_an_invalid_answer_is_named(step, wrong):
    with pytest.raises(ObservationError, match=wrong):
        checked(step)


def test_different_observations_have_different_fingerprints():
    said = ["", "1", [], TokenIds(()), TokenIds((1,)), [{"role": "user", "content": "1"}]]
    assert len({fingerprint(observation) for observation in said}) == len(said)
    assert fingerprint([{"role": "user", "content": "1"}]) == fingerprint([{"content": "1", "role": "user"}])


def test_a_key_names_the_step_of_the_episode():
    assert Turn("3.1", 2, "", ()).key == "3.1/2"
    assert Turn("3.1", 2, "", (), attempt=1).key == "3.1~1/2"
