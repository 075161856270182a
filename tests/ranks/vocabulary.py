"""Scores of ranks that each have a part of the vocabulary's logits, against one process with all logits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from april.algorithms.logprobs import token_logprobs
from april.training.ranks import Ranks
from april.training.vocab_parallel import vocab_parallel_logprobs

TOKENS, SIZE, VOCABULARY, HELD = 9, 6, 13, 8
"""The last of two ranks has three columns of padding."""


def compare(ranks: Ranks) -> None:
    """Values and gradients to float32's rounding, with chunks of any size, and without a token."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, SIZE, generator=generator) for n in (TOKENS, HELD * ranks.world))
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    of_logp, of_entropy = (torch.randn(TOKENS, generator=generator) for _ in range(2))
    first = HELD * ranks.rank
    columns = first, min(HELD, VOCABULARY - first)
    all_ = hidden.clone().requires_grad_(), weight[:VOCABULARY].clone().requires_grad_()
    temperatures = torch.rand(TOKENS, generator=generator) + 0.5
    expected = token_logprobs(*all_, targets, temperatures)
    (expected[0] @ of_logp + expected[1] @ of_entropy).backward()
    for rows in (None, 1, 4):
        states, own = hidden.clone().requires_grad_(), weight[first : first + HELD].clone().requires_grad_()
        found = vocab_parallel_logprobs(
            lambda x, own=own: x @ own.T, states, targets, columns, None, temperatures, rows
        )
        (found[0] @ of_logp + found[1] @ of_entropy).backward()
        dist.all_reduce(states.grad)  # as the head's layer does, whose output is divided
        for value, other in zip(found, expected, strict=True):
            torch.testing.assert_close(value, other)
        torch.testing.assert_close(states.grad, all_[0].grad)
        torch.testing.assert_close(own.grad[: columns[1]], all_[1].grad[first : first + columns[1]])
        assert not own.grad[columns[1] :].any(), "padding is trained"
    nothing = vocab_parallel_logprobs(lambda x: x @ weight[:HELD].T, hidden[:0], targets[:0], columns, None)
    assert [len(part) for part in nothing] == [0, 0]
    print("same", flush=True)
