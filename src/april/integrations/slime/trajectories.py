"""Log-probabilities of the samples that generate functions return.

A function that exchanges text has no log-probabilities, and tokenizes responses again: its tokens are compared with the
tokens that the policy drew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slime.utils.types import Sample as SlimeSample

from april.integrations.generating_code import CodeEpisode, LeftOutError


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
    turns = iter(episode.turns)
    response = sample.tokens[prompt:]
    for start, end in spans(mask):
        span = response[start:end]
        for turn in turns:
            same = common(span, turn.response)
            # A template may leave out the token that ended the turn, or add tokens behind it.
            if same and same >= min(len(span), len(turn.response) - 1):
                break
        else:
            raise LeftOutError("the generate function returned other tokens than the policy drew")
        logprobs[start : start + same] = turn.logprobs[:same]
        mask[start + same : end] = [0] * (end - start - same)
    sample.rollout_log_probs, sample.loss_mask = logprobs, mask


def spans(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each run of ones."""
    start = None
    for index, counts in enumerate([*mask, 0]):
        if counts and start is None:
            start = index
        elif not counts and start is not None:
            yield start, index
            start = None


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading tokens that two sequences share."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
