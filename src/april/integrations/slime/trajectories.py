"""Log-probabilities of the samples that generate functions return.

A function that exchanges text has no log-probabilities, and tokenizes responses again: its tokens are compared with the
tokens that the policy drew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slime.utils.types import Sample as SlimeSample

from april.integrations.generating_code import CodeEpisode, DrawnTurn, LeftOutError
from april.rollout.episodes.turn_places import common_prefix


def fill_logprobs(episode: CodeEpisode, sample: SlimeSample) -> None:
    """Complete a sample's log-probabilities and loss mask.

    Raises:
        ObservationError: the function gave log-probabilities for tokens that the policy did not draw.
        LeftOutError: the function tokenized a response into other tokens than the policy drew.
    """
    length = sample.response_length
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    prompt = len(sample.tokens) - length
    if sample.rollout_log_probs is not None:
        episode.check(sample.tokens, [False] * prompt + [bool(counts) for counts in mask])
        return
    logprobs = [0.0] * length
    last = -1
    for start, end in spans(mask):
        last, begin, same = match(episode.turns, sample.tokens[: prompt + end], prompt + start, last)
        logprobs[start : start + same] = episode.turns[last].logprobs[begin : begin + same]
        mask[start + same : end] = [0] * (end - start - same)
    sample.rollout_log_probs, sample.loss_mask = logprobs, mask


def match(turns: Sequence[DrawnTurn], tokens: Sequence[int], start: int, last: int) -> tuple[int, int, int]:
    """Find the turn whose response a span of a trajectory is.

    Args:
        turns: of the episode, in the order of their requests.
        tokens: the trajectory up to the end of the span.
        start: first token of the span.
        last: index of the turn that the span before is of; -1: there is none.

    Returns:
        Index of the turn, first token of its response in the span, and number of tokens that the two share. A template
        may leave out the token that ended the turn, or add tokens behind it.

    Raises:
        LeftOutError: there is no such turn, or several may be meant.
    """
    before, span = tokens[:start], tokens[start:]
    # Turns in whose response the span begins, behind the very tokens that the policy saw.
    begins = {index: start - len(turn.token_ids) + len(turn.response) for index, turn in enumerate(turns)}
    exact = [
        index
        for index, turn in enumerate(turns)
        if 0 <= begins[index] < len(turn.response) and turn.token_ids[:start] == before
    ]
    # Where the function tokenized the prompt again, only the response and the order identify the turn.
    found = []
    for index in exact or range(last + 1, len(turns)):
        begin = begins[index] if exact else 0
        drawn = turns[index].response[begin:]
        same = common_prefix(span, drawn)
        if same and same >= min(len(span), len(drawn) - 1):
            found.append((index, begin, same))
    if not found:
        raise LeftOutError("the generate function returned other tokens than the policy drew")
    most = max(same for _, _, same in found)
    best = [place for place in found if place[2] == most]
    # The same tokens drawn twice behind the same prompt are no doubt: each has a log-probability of its drawing.
    if len(best) > 1 and not exact:
        raise LeftOutError("the generate function returned tokens that several responses begin with")
    return best[0]


def spans(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each run of ones."""
    start = None
    for index, counts in enumerate([*mask, 0]):
        if counts and start is None:
            start = index
        elif not counts and start is not None:
            yield start, index
            start = None
