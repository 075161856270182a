"""Rewards for the form of a response, weighted together with others for its content: 1 if the form is kept, else 0."""

from __future__ import annotations

import re

ANSWERED = re.compile(r"((?!</?answer>).)*<answer>((?!</?answer>).)+</answer>\s*", re.DOTALL)
SAID = r"\s*(?!</?think>)\S((?!</?think>).)*"
THOUGHT = re.compile(rf"\s*(<think>)?{SAID}</think>{SAID}", re.DOTALL)


def boxed(response: str) -> float:
    r"""Return 1 if the last line has content in \boxed{…}."""
    lines = response.strip().splitlines()
    return float(bool(lines) and re.search(r"\\boxed\{\s*[^\s}]", lines[-1]) is not None)


def answered(response: str) -> float:
    """1 if there is one <answer>…</answer>, at the end."""
    return float(ANSWERED.fullmatch(response) is not None)


def thought(response: str) -> float:
    """1 for one <think>…</think> with something in it, then something more. Where the chat template writes <think> into
    the prompt, the response begins inside it."""
    return float(THOUGHT.fullmatch(response) is not None)
