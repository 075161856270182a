from __future__ import annotations

import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.tasks.prompts import PromptStream
from april.tasks.task import Problem, Task
from tests.tasks.conftest import make_tokenizer

TOKENIZER = make_tokenizer()


class Lengths(Task):
    """A problem per length, each a prompt of that many tokens."""

    name = "lengths"
    eval_size = 0

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def problem(self, index, split="train"):
        return Problem(str(index), "x" * self.lengths[index])


def ids(stream, count) -> list[str]:
    return [prompt.id for prompt in islice(stream, count)]


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 30), seed=st.integers(0, 2**40))
def test_every_epoch_gives_each_problem_exactly_once(size, seed):
    stream = PromptStream(Lengths([3] * size), TOKENIZER, seed)
    for _ in range(3):
        assert sorted(ids(stream, size), key=int) == [str(i) for i in range(size)]


def test_the_order_follows_from_seed_and_epoch():
    orders = [ids(PromptStream(Lengths([3] * 20), TOKENIZER, seed), 40) for seed in (5, 5, 6)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:20] != orders[0][20:]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12).filter(lambda lengths: min(lengths) <= 4),
    taken=st.integers(0, 40),
)
def test_a_restored_stream_goes_on_where_the_saved_one_stood(lengths, taken):
    def stream():
        return PromptStream(Lengths(lengths), TOKENIZER, seed=3, max_prompt_length=4)

    whole = stream()
    ids(whole, taken)
    restored = stream()
    restored.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert ids(restored, 25) == ids(whole, 25)
    assert restored.state_dict() == whole.state_dict()


@pytest.mark.parametrize(("size", "seed", "name"), [(4, 0, "size"), (3, 1, "seed")])
def test_a_state_of_other_settings_is_refused(size, seed, name):
    state = PromptStream(Lengths([3] * 3), TOKENIZER).state_dict()
    with pytest.raises(ValueError, match=f"of {name} {state[name]}, but the settings say"):
        PromptStream(Lengths([3] * size), TOKENIZER, seed).load_state_dict(state)


def test_overlong_prompts_are_passed_over_counted_and_named(caplog):
    stream = PromptStream(Lengths([3, 9, 4, 9]), TOKENIZER, max_prompt_length=4)
    assert [sorted(ids(stream, 2)), sorted(ids(stream, 2))] == [["0", "2"], ["0", "2"]]
    next(stream)
    assert stream.filtered >= 4
    assert len(caplog.messages) == 1
    assert "max_prompt_length = 4" in caplog.text


def test_overlong_prompts_are_an_error_if_they_shall_be():
    stream = PromptStream(Lengths([3, 9]), TOKENIZER, max_prompt_length=4, overlong_prompts="error")
    with pytest.raises(ValueError, match="problem '1' has a prompt of 9 tokens, max_prompt_length = 4"):
        ids(stream, 2)


def test_when_every_prompt_is_too_long_it_says_so():
    with pytest.raises(ValueError, match="max_prompt_length = 4: every prompt of lengths is longer"):
        next(PromptStream(Lengths([5, 6, 7]), TOKENIZER, max_prompt_length=4))


@pytest.mark.parametrize("setting", [{"max_prompt_length": 0}, {"overlong_prompts": "skip"}])
def test_wrong_settings_are_named(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} = "):
        PromptStream(Lengths([1]), TOKENIZER, **setting)
