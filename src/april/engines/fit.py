"""Validate requests before they are sent: engines crash on invalid requests, truncate them, or fail them each time."""

from __future__ import annotations

import itertools

from april.rollout.trajectory.sample import Sample

NO_IMAGES = "gets no images from april: use the embedded engine, or vLLM or SGLang connected with `images`"


def require_room(sample: Sample, context_length: int, engine: str) -> None:
    """Check that a sample has a prompt, and that the policy may sample a further token in `engine`.

    An engine would fail such a request each time, which looks like an outage of the engine.

    Raises:
        ValueError: names the sample, the limit and the remedy.
    """
    if not sample.prompt_ids:
        raise ValueError(f"sample {sample.id}: the prompt is empty")
    tokens = len(sample.prompt_ids) + sample.length
    if tokens >= context_length:
        raise ValueError(
            f"sample {sample.id}: {tokens} tokens fill the context of {engine}, {context_length} tokens: shorten the "
            "prompt, or give the engine a longer context"
        )
    if sample.budget_left < 1:
        raise ValueError(f"sample {sample.id}: nothing is left of its response budget")


def require_fit(
    sample: Sample, context_length: int, vocab_size: int, engine: str, no_images: str | None = NO_IMAGES
) -> None:
    """Check that a server answers a request for a sample: `require_room`, images, and the token ids.

    Args:
        no_images: why the engine cannot take prompts with images, and the remedy; None if it can.

    Raises:
        ValueError: names the sample, the limit and the remedy.
    """
    if sample.features and no_images is not None:
        raise ValueError(f"sample {sample.id}: its prompt has images, but {engine} {no_images}")
    total = len(sample.prompt_ids) + sample.sampling.max_tokens
    if total > context_length and not sample.sampling.max_turns:  # an episode ends where the context does
        raise ValueError(
            f"sample {sample.id}: a prompt of {len(sample.prompt_ids)} tokens and a response budget of "
            f"{sample.sampling.max_tokens} do not fit {engine}, whose context length is {context_length}: shorten the "
            "prompt, lower max_tokens, or start the server with a longer context"
        )
    require_room(sample, context_length, engine)
    segments = (segment.token_ids for segment in sample.segments)
    for token in itertools.chain(sample.prompt_ids, *segments, sample.sampling.stop_token_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"sample {sample.id}: token {token} is outside the vocabulary of {engine} ({vocab_size} tokens): is "
                "the tokenizer that of the model?"
            )
