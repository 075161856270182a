from __future__ import annotations

import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.tasks.encoding import Encoder
from april.tasks.prompts import PromptStream
from april.tasks.task import Problem, Task
from tests import tiny
from tests.tasks.conftest import make_tokenizer

ENCODER = Encoder(make_tokenizer())


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
def test_every_epoch_contains_each_problem_once(size, seed):
    stream = PromptStream(Lengths([3] * size), ENCODER, seed)
    for _ in range(3):
        assert sorted(ids(stream, size), key=int) == [str(i) for i in range(size)]


def test_the_order_follows_from_seed_and_epoch():
    orders = [ids(PromptStream(Lengths([3] * 20), ENCODER, seed), 40) for seed in (5, 5, 6)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:20] != orders[0][20:]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12).filter(lambda lengths: min(lengths) <= 4),
    taken=st.integers(0, 40),
)
def test_a_restored_stream_continues_at_the_saved_position(lengths, taken):
    def stream():
        return PromptStream(Lengths(lengths), ENCODER, seed=3, max_prompt_length=4)

    whole = stream()
    ids(whole, taken)
    restored = stream()
    restored.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert ids(restored, 25) == ids(whole, 25)
    assert restored.state_dict() == whole.state_dict()


@pytest.mark.parametrize(("size", "seed", "name"), [(4, 0, "size"), (3, 1, "seed")])
def test_a_state_of_other_settings_is_refused(size, seed, name):
    state = PromptStream(Lengths([3] * 3), ENCODER).state_dict()
    with pytest.raises(ValueError, match=f"of {name} {state[name]}, but the settings say"):
        PromptStream(Lengths([3] * size), ENCODER, seed).load_state_dict(state)


def test_overlong_prompts_are_passed_over_counted_and_named(caplog):
    stream = PromptStream(Lengths([3, 9, 4, 9]), ENCODER, max_prompt_length=4)
    assert [sorted(ids(stream, 2)), sorted(ids(stream, 2))] == [["0", "2"], ["0", "2"]]
    next(stream)
    assert stream.filtered >= 4
    assert len(caplog.messages) == 1
    assert "more than the 4" in caplog.text


def test_overlong_prompts_are_an_error_on_request():
    stream = PromptStream(Lengths([3, 9]), ENCODER, max_prompt_length=4, on_overlong="raise")
    with pytest.raises(ValueError, match="problem '1': its prompt has 9 tokens, more than the 4"):
        ids(stream, 2)


def test_an_error_names_that_every_prompt_is_too_long():
    with pytest.raises(ValueError, match=r"no prompt of lengths can be used: problem .* tokens, more than the 4"):
        next(PromptStream(Lengths([5, 6, 7]), ENCODER, max_prompt_length=4))


@pytest.mark.parametrize("setting", [{"max_prompt_length": 0}, {"on_overlong": "filter"}])
def test_wrong_settings_are_named(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} = "):
        PromptStream(Lengths([1]), ENCODER, **setting)


class Records(Lengths):
    """As `Lengths`, stored; a problem of no length has no prompt."""

    stored = True

    def place(self, problem, split="train"):
        return f"data.jsonl:{int(problem.id) + 1}"


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        (
            [3, 0, 3, 0],
            {},
            r"^data.jsonl:[24]: its prompt is empty \(2 of 4 prompts cannot be used; task",
        ),
        (
            [3, 9],
            {"on_overlong": "raise"},
            r"^data.jsonl:2: its prompt has 9 tokens, more than the 4 .*\(1 of 2",
        ),
        ([0, 9], {"on_bad_record": "skip"}, r"^data.jsonl:1: its prompt is empty \(2 of 2 prompts cannot be used\)"),
    ],
)
def test_stored_prompts_are_tried_before_training(lengths, settings, message):
    with pytest.raises(ValueError, match=message):
        PromptStream(Records(lengths), ENCODER, max_prompt_length=4, **settings).inspect()


def test_omitted_prompts_are_counted_and_reported(caplog):
    stream = PromptStream(Records([3, 0, 9, 3]), ENCODER, max_prompt_length=4, on_bad_record="skip")
    stream.inspect()
    assert stream.skipped == 2
    assert [message.partition(":")[0] for message in caplog.messages] == [
        '1 of 4 prompts are left out (task.on_bad_record = "skip")',
        "1 of 4 prompts are left out (max_prompt_length = 4)",
    ]
    assert sorted(ids(stream, 2)) == sorted(ids(stream, 2)) == ["0", "3"]
    assert len(caplog.messages) == 2


def test_problems_are_generated_until_one_is_usable():
    stream = PromptStream(Lengths([9] * 200 + [3]), ENCODER, max_prompt_length=4)
    stream.inspect()
    assert (stream.position, ids(stream, 1)) == (0, ["200"])
    with pytest.raises(ValueError, match=r"no prompt of lengths can be used: problem .* more than the 4"):
        PromptStream(Lengths([9] * 20), ENCODER, max_prompt_length=4).inspect()


def test_prompts_after_the_look_ahead_are_refused_with_their_line(monkeypatch):
    monkeypatch.setattr("april.tasks.prompts.LOOK_AHEAD", 1)
    stream = PromptStream(Records([0] + [3] * 9), ENCODER, seed=1)
    stream.inspect()
    with pytest.raises(ValueError, match=r"^data.jsonl:1: its prompt is empty; task.on_bad_record = .skip. leaves"):
        ids(stream, 10)
    stream.on_bad_record = "skip"
    assert "0" not in ids(stream, 20)


def test_unknown_tokens_are_reported(caplog):
    class Words(Records):
        def problem(self, index, split="train"):
            return Problem(str(index), ("2 + 2?", "naïve")[index])

    stream = PromptStream(Words([1, 1]), Encoder(tiny.tokenizer()))
    stream.inspect()
    [said] = caplog.messages
    assert said.startswith("1 of 2 prompts contain text that the tokenizer does not know")
    assert said.endswith("first: data.jsonl:2")
