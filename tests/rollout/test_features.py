"""Images of prompts in the core: features survive what a sample survives, and ids are expanded once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april import Group, Prompt, SamplingParams
from april.rollout.events import Admitted
from april.rollout.journal.records import decode, encode
from april.rollout.trajectory.features import Feature

PLACEHOLDER = 9


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """A prompt with text and up to four images, of which two may be adjacent."""
    ids, features = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5)), []
    for number in range(draw(st.integers(0, 4))):
        length = draw(st.integers(1, 5))
        features.append(Feature(f"{number}.png", f"{number:064x}", len(ids), length))
        ids += [PLACEHOLDER] * length + draw(st.lists(st.integers(0, 20), max_size=3))
    return Prompt(tuple(ids), "p", {"answer": "x"}, features=tuple(features))


@given(prompts())
def test_journal_and_checkpoints_restore_prompts_with_their_images(prompt: Prompt) -> None:
    sampling = SamplingParams(10)
    [record] = encode([Admitted(3, prompt, 2, sampling, 0, None)], 1)
    [admitted] = decode(record)
    assert isinstance(admitted, Admitted)
    assert admitted.prompt == prompt

    group = Group.start(3, prompt, 2, sampling, 0)
    group.samples[0].extend([4, PLACEHOLDER], [-1.0, -2.0], 0)
    restored = Group.from_dict(json.loads(json.dumps(group.to_dict())))
    for sample, original in zip(restored.samples, group.samples, strict=True):
        assert sample.features == original.features == prompt.features
        assert sample.prompt_ids == prompt.token_ids


@given(prompts())
def test_display_shows_one_placeholder_for_each_image(prompt: Prompt) -> None:
    shown = prompt.shown_ids
    assert len(shown) == len(prompt.token_ids) - sum(feature.length - 1 for feature in prompt.features)


def test_restarts_and_redrafts_keep_the_images() -> None:
    prompt = Prompt((1, PLACEHOLDER, PLACEHOLDER), features=(Feature("a.png", "0", 1, 2),))
    group = Group.start(0, prompt, 1, SamplingParams(10, max_turns=3), 0)
    group.restart(0)
    group.redraft()
    assert group.samples[0].features == prompt.features


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([(1, 5)], "outside the prompt of 4 tokens"),
        ([(1, 0)], "outside the prompt of 4 tokens, or overlap"),
        ([(1, 2), (2, 1)], "overlap those of another image"),
        ([(0, 2)], "not all its placeholder"),
    ],
)
def test_ranges_that_do_not_fit_the_prompt_are_refused(features: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Prompt((1, 9, 9, 9), features=tuple(Feature("a.png", "0", *one) for one in features))
