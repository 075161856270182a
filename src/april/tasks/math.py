"""Mathematical answers compared by meaning, with math-verify (https://github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import threading
from typing import Any

from math_verify import parse, verify

from april.rollout.rewards import RewardError
from april.tasks.task import Problem

PATIENCE = 5
"""Seconds that math-verify gives one expression to be parsed, and one comparison; beyond, the answer is wrong."""


def math_verify(problem: Problem, response: str) -> float:
    """1 if the last mathematical answer in `response` equals the problem's answer, else 0.

    math-verify keeps its own time with an alarm signal, which reaches only the main thread of a process, such as that
    of a reward worker. In any other thread nothing stops an expression that takes for ever.

    Raises:
        RewardError: the problem has no answer, or none that math-verify can read.
    """
    seconds = PATIENCE if threading.current_thread() is threading.main_thread() else None
    gold = parse_answer(problem.answer or "", seconds)
    if not gold:
        raise RewardError(f"problem {problem.id!r}: math-verify finds no answer in {problem.answer!r}")
    return float(verify(gold, parse(response, parsing_timeout=seconds), timeout_seconds=seconds))


def parse_answer(answer: str, seconds: int | None = None) -> list[Any]:
    """A reference answer as math-verify's expressions, empty if there is none.

    References come bare (`2x+3`), as LaTeX between marks (`$2x+3$`), or at the end of a worked solution after `####`
    (GSM8K). A bare one is put in a box, because math-verify reads unmarked text only up to its first number.
    """
    answer = answer.rpartition("####")[2].strip()
    if not answer:
        return []
    marked = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
    parsed: list[Any] = parse(answer, parsing_timeout=seconds) if marked else []
    return parsed or list(parse(f"\\boxed{{{answer}}}", parsing_timeout=seconds))
