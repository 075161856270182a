"""Mathematical answers compared by meaning, with math-verify (https://github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from math_verify import parse, verify

from april.rollout.rewards import RewardError
from april.tasks.answers import has_words, is_missing, is_plain_number, reading, solution, text_of
from april.tasks.task import Problem

PATIENCE = 5
"""Seconds that math-verify gives one expression to be parsed, and one comparison; beyond, the answer is wrong."""
MARKS = ("$", "\\boxed", "\\(", "\\[")
"""LaTeX that marks mathematics within a text."""
TRIED = 500
"""Different answers that are parsed before training, to warn about those that cannot be."""
EXAMPLES = 3

logger = logging.getLogger(__name__)


def math_verify(problem: Problem, response: str) -> float:
    """1 if the last mathematical answer in `response` equals the problem's answer, else 0.

    math-verify keeps its own time with an alarm signal, which reaches only the main thread of a process, such as that
    of a reward worker. In any other thread nothing stops an expression that takes for ever.

    Raises:
        RewardError: the problem has no answer.
    """
    seconds = _patience()
    if is_missing(problem.answer):
        raise RewardError(f"problem {problem.id!r}: math-verify finds no answer in {problem.answer!r}")
    gold = parse_answer(problem.answer, seconds)
    return float(verify(gold, parse(response, parsing_timeout=seconds), timeout_seconds=seconds))


def _patience() -> int | None:
    return PATIENCE if threading.current_thread() is threading.main_thread() else None


def parse_answer(answer: Any, seconds: int | None = None) -> list[Any]:
    r"""A reference answer as math-verify's expressions and texts, of which a response has to equal one; never empty.

    Text comes bare (`2x+3`), as LaTeX between marks (`$2x+3$`), or at the end of a worked solution after `####`
    (GSM8K). Bare text is put in a box, because math-verify reads unmarked text only up to its first number. Other JSON
    values are read by their type: a list in its order, with or without brackets, an object as equations.
    """
    if isinstance(answer, str):
        answer = solution(answer)
        if any(mark in answer for mark in MARKS) and (parsed := parse(answer, parsing_timeout=seconds)):
            return list(parsed)
    own = reading(answer)
    found = [each for latex in own.latex for each in parse(f"\\boxed{{{latex}}}", parsing_timeout=seconds)]
    return [*found, *own.texts] or [text_of(answer)]


def warn_of_unreadable(answers: Iterable[Any]) -> None:
    """Log how many answers hold no mathematics that math-verify can read, with examples.

    Numbers are not tried. Of the other answers, `TRIED` different ones are, evenly spread.
    """
    known = {text_of(answer): answer for answer in answers}
    doubtful = [answer for answer in known.values() if not is_plain_number(answer)]
    tried = doubtful[:: max(len(doubtful) // TRIED, 1)][:TRIED]
    if unreadable := [answer for answer in tried if not readable(answer)]:
        logger.warning(
            "math-verify reads no mathematics in %d of the %d different answers tried (%s): only a box with the same "
            "text matches them",
            len(unreadable),
            len(known) - len(doubtful) + len(tried),
            ", ".join(map(repr, unreadable[:EXAMPLES])) + (", …" if len(unreadable) > EXAMPLES else ""),
        )


def readable(answer: Any) -> bool:
    """Whether math-verify makes mathematics of a reference answer."""
    if isinstance(answer, bool):
        return True
    parsed: Sequence[Any] = parse_answer(answer, _patience())
    return not has_words(answer) and not all(isinstance(each, str) for each in parsed)
