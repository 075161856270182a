"""Reference answers keep their type, and responses that mean the same match them."""

from __future__ import annotations

import json

import pytest

from april.tasks.answers import text_of
from april.tasks.build import build_task
from april.tasks.math import math_verify, readable
from april.tasks.task import Problem, TaskSpec


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (True, ["True", "true", "\\text{True}", "\\text{true}"], ["False", "1"]),
        (False, ["False", "\\text{false}"], ["True", "0"]),
        (1e-05, ["0.00001", "10^{-5}", "1 \\times 10^{-5}"], ["-5", "1"]),
        (2e16, ["20000000000000000", "2\\times10^{16}"], ["2", "16"]),
        (20000000000000000, ["20000000000000000"], ["2"]),
        (0.5, ["0.5", "\\frac{1}{2}"], ["5"]),
        ("1e-05", ["0.00001"], ["1"]),
        ("2e16", ["20000000000000000"], ["2"]),
        ([3, 4], ["3, 4", "[3, 4]", "(3, 4)"], ["4, 3", "[4, 3]", "3", "3 \\le x \\le 4"]),
        ([1, 2, 3], ["1, 2, 3", "[1, 2, 3]"], ["1, 2", "[3, 2, 1]"]),
        ([0.5, 1e-05], ["\\frac12, 0.00001"], ["0.5"]),
        ([7], ["7", "[7]"], ["6"]),
        ({"x": 1, "y": 2}, ["x = 1, y = 2", "y=2, x=1"], ["x=2, y=1"]),
        ({"x": 0.5}, ["x = \\frac{1}{2}"], ["x = 2"]),
        ("3 1/4", ["13/4", "3.25", "3\\frac{1}{4}", "3 1/4"], ["1", "3", "1/4"]),
        ("-3 1/4", ["-\\frac{13}{4}"], ["-1"]),
        ("3 1/4 cups", ["13/4", "3.25"], ["1"]),
        ("18 dollars", ["18", "18 dollars", "18\\text{ dollars}"], ["19"]),
        ("30 km/h", ["30", "30 km/h", "30\\text{ km/h}"], ["31"]),
        ("9.8 m/s^2", ["9.8"], ["9"]),
        ("1,234 people", ["1234"], ["1"]),
        ("1.5 million dollars", ["1500000"], ["1.5"]),
        ("5 percent", ["5\\%"], ["6"]),
        ("2 dozen eggs", ["24"], ["2"]),
        ("3 and a half", [], ["3"]),
        ("5 pi", ["5\\pi"], ["5"]),
        ("{", ["{"], ["1"]),
        ("½", ["\\frac{1}{2}", "0.5"], ["2"]),
        ("-3½", ["-3.5"], ["3.5"]),
        ("1⁄2", ["0.5"], ["1"]),
        ("√2", ["\\sqrt{2}"], ["2"]),
        ("∞", ["\\infty"], ["0"]),
        ("−5", ["-5"], ["5"]),
        ("90°", ["90", "90^\\circ"], ["9"]),
        ("-5 °C", ["-5"], ["5"]),
        ("1 000", ["1000", "1,000"], ["1", "0"]),
        ("12\u00a0345.5", ["12345.5"], ["12"]),
        ("€5", ["5"], ["4"]),
        ("18 €", ["18"], ["1"]),
        ("US$1,200.50", ["1200.5"], ["1"]),
        ("42.", ["42"], ["4"]),
        ("pi/2", ["\\frac{\\pi}{2}"], ["2"]),
        ("10^-3", ["0.001"], ["10"]),
        ("x^10 + 1", ["x^{10} + 1"], ["x + 1"]),
    ],
    ids=lambda value: json.dumps(value) if not isinstance(value, list) else "",
)
def test_equivalent_answers_of_every_type_match(answer, right, wrong):
    given = {box: math_verify(Problem("p", "?", answer), f"\\boxed{{{box}}}") for box in (*right, *wrong)}
    assert given == {**dict.fromkeys(right, 1.0), **dict.fromkeys(wrong, 0.0)}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, None),
        ("4", "4"),
        (4, "4"),
        (1e-05, "0.00001"),
        (2e16, "20000000000000000"),
        (True, "true"),
        ([3, 4], "[3, 4]"),
    ],
)
def test_a_reward_function_is_given_the_answer_as_text(answer, text):
    assert text_of(answer) == text


@pytest.mark.parametrize("answer", ["18 dollars", "2x+3", "\\frac{1}{2}", "B", [3, 4], {"x": 1}, True, "2\\sin x"])
def test_mathematics_is_readable(answer):
    assert readable(answer)


def test_answers_without_mathematics_are_counted_before_training_with_three_examples(tmp_path, caplog):
    words = ["Evelyn", "3 hours 20 minutes", "Paris", "3 and a half"]
    lines = [{"prompt": str(i), "answer": answer} for i, answer in enumerate([*words, 4, "1/2", "18 dollars", [3, 4]])]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    build_task(TaskSpec("records", path=str(tmp_path / "data.jsonl")))
    [said] = caplog.messages
    assert said.startswith(
        "math-verify reads no mathematics in 4 of the 8 different answers tried "
        "('Evelyn', '3 hours 20 minutes', 'Paris', …)"
    )
