"""What an engine refuses before it is sent: a server may not survive it, or would cut it down without a word."""

from __future__ import annotations

import itertools

from april.rollout.trajectory.sample import Sample


def require_fit(sample: Sample, context_length: int, vocab_size: int, engine: str) -> None:
    """Check that a sample can continue in `engine`.

    Raises:
        ValueError: names the sample, the limit and the remedy.
    """
    if sample.features:
        raise ValueError(
            f"sample {sample.id}: its prompt has images, which april does not send to {engine}: use the embedded engine"
        )
    total = len(sample.prompt_ids) + sample.sampling.max_tokens
    if total > context_length and not sample.sampling.max_turns:  # an episode ends where the context does
        raise ValueError(
            f"sample {sample.id}: a prompt of {len(sample.prompt_ids)} tokens and a response budget of "
            f"{sample.sampling.max_tokens} do not fit {engine}, whose context length is {context_length}: shorten the "
            "prompt, lower max_tokens, or start the server with a longer context"
        )
    if not sample.prompt_ids:
        raise ValueError(f"sample {sample.id}: the prompt is empty")
    if len(sample.prompt_ids) + sample.length >= context_length:
        raise ValueError(
            f"sample {sample.id}: {len(sample.prompt_ids) + sample.length} tokens fill the context of {engine}, "
            f"{context_length} tokens"
        )
    if sample.budget_left < 1:
        raise ValueError(f"sample {sample.id}: nothing is left of its response budget")
    segments = (segment.token_ids for segment in sample.segments)
    for token in itertools.chain(sample.prompt_ids, *segments, sample.sampling.stop_token_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"sample {sample.id}: token {token} is outside the vocabulary of {engine} ({vocab_size} tokens): is "
                "the tokenizer that of the model?"
            )
