"""Drawing tokens.

Invariants:
- a token is the inverse of its row's cumulative distribution at its own uniform number, in the order of the vocabulary,
  so a row's token depends only on its logits, its settings and that number;
- the log-probability refers to the distribution drawn from: softmax(logits / temperature), renormalised over the tokens
  that top-k, then top-p, then min-p leave; at temperature 0, log softmax(logits).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from april.engines.embedded.upload import upload
from april.rollout.sampling import SamplingParams

_BLOCK = 256
_WHOLE = 2048
_NUCLEUS = 1024
_BELOW_ONE = 1 - 2.0**-52


def sample(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Draw one token for each row of `logits` [rows, vocabulary], which is overwritten.

    The host waits for the device once, and a second time if the nucleus of a row has more tokens than were sorted.

    Returns:
        token ids and log-probabilities (nats), one per row.
    """
    numbers = upload(np.array(uniforms, np.float64), logits.device)
    tokens, logprobs, complete = _draw(logits, sampling, numbers, range(len(sampling)))
    again = [row for row, whole in enumerate(complete) if not whole]
    if again:
        for row, token, logprob, _ in zip(again, *_draw(logits, sampling, numbers, again, sort=True), strict=True):
            tokens[row], logprobs[row] = token, logprob
    return [int(token) for token in tokens], logprobs


def _draw(
    logits: torch.Tensor,
    sampling: Sequence[SamplingParams],
    numbers: torch.Tensor,
    rows: Sequence[int],
    sort: bool = False,
) -> tuple[list[float], list[float], list[float]]:
    """Return tokens, log-probabilities and completeness of `rows`; rows with the same settings are drawn together."""
    first = sampling[0]
    if len(rows) == len(logits) and all(params is first for params in sampling):
        drawn = draw(logits, first, numbers, sort)
    else:
        members: dict[SamplingParams, list[int]] = {}
        for place, row in enumerate(rows):
            members.setdefault(sampling[row], []).append(place)
        drawn = torch.empty(3, len(rows), dtype=torch.float64, device=logits.device)
        for params, places in members.items():
            both = upload(np.array([places, [rows[place] for place in places]]), logits.device)
            drawn[:, both[0]] = draw(logits[both[1]], params, numbers[both[1]], sort)
    tokens, logprobs, complete = drawn.tolist()
    return tokens, logprobs, complete


def draw(logits: torch.Tensor, params: SamplingParams, uniforms: torch.Tensor, sort: bool = False) -> torch.Tensor:
    """Draw for rows that share their settings; overwrites `logits` unless `top_p` is below 1.

    Args:
        sort: sort the whole vocabulary to find a nucleus.

    Returns:
        [3, rows] float64: token ids, log-probabilities, and whether the row's nucleus lay within the sorted tokens.
    """
    weights = logits.float() if params.top_p == 1 else logits.to(torch.float32, copy=True)
    if params.temperature == 0:
        tokens = weights.argmax(-1)
        logprobs = weights.gather(1, tokens[:, None])[:, 0] - weights.logsumexp(-1)
        return torch.stack((tokens.double(), logprobs.double(), torch.ones_like(logprobs, dtype=torch.float64)))
    if params.temperature != 1:
        weights.div_(params.temperature)
    # The maximum becomes 0: exp cannot overflow, and min-p is a threshold relative to the best token.
    weights.sub_(weights.amax(-1, keepdim=True))
    complete = _truncate(weights, params, sort)
    weights.exp_()
    # Closer to 1, the product with the total may round to the total, which no cumulative weight exceeds.
    tokens, total = _invert(weights, uniforms.clamp(max=_BELOW_ONE))
    logprobs = weights.gather(1, tokens[:, None])[:, 0].log() - total.log()
    return torch.stack((tokens.double(), logprobs.double(), complete.double()))


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first index at which each row's cumulative weight exceeds `uniforms` of its total, and totals [rows].

    A large vocabulary is summed in blocks; only the block that contains the index is accumulated element by element.
    """
    size = weights.shape[1]
    if size <= _WHOLE:
        index, total, _ = _search(weights, uniforms)
        return index, total
    whole = size // _BLOCK * _BLOCK
    blocks = weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    if whole < size:
        blocks = torch.cat((blocks, weights[:, whole:].sum(-1, keepdim=True)), 1)
    block, total, within = _search(blocks, uniforms)
    index = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    # The last block may be shorter: places behind the vocabulary have weight 0.
    members = weights.gather(1, index.clamp(max=size - 1)).masked_fill_(index >= size, 0)
    offset, _, _ = _search(members, within)
    return block * _BLOCK + offset, total


def _search(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's index, its total, and the position of the number within the index's own weight, in [0, 1)."""
    # In float64: sums over a large vocabulary would lose small weights in float32.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = (uniforms * total)[:, None]
    # right=True: a token of weight 0 never contains the target.
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)
    upper = cumulative.gather(1, index)
    lower = cumulative.gather(1, (index - 1).clamp_(min=0)).masked_fill_(index == 0, 0)
    within = ((target - lower) / (upper - lower)).clamp_(0, _BELOW_ONE)
    return index[:, 0], total, within[:, 0]


def _truncate(scores: torch.Tensor, params: SamplingParams, sort: bool) -> torch.Tensor:
    """Set scores [rows, vocabulary], whose maximum is 0 in each row, to -inf where a token may not be drawn.

    Returns:
        whether this was possible, [rows]; False if the nucleus has more tokens than were sorted.
    """
    size = scores.shape[1]
    complete = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    top_k = params.top_k if 0 < params.top_k < size else 0
    if top_k or params.top_p < 1:
        values, index = _largest(scores, top_k, sort)
        if params.top_p < 1:
            # After top-k, top-p is a share of the mass that top-k leaves; otherwise of the whole vocabulary.
            mass = None if top_k else _mass(scores)
            probabilities = values.double().exp()
            if mass is not None and values.shape[1] < size:
                # Candidates with more than `top_p` of the mass contain the whole nucleus.
                complete = probabilities.sum(-1) > params.top_p * mass[:, 0]
            probabilities /= probabilities.sum(-1, keepdim=True) if mass is None else mass
            before = probabilities.cumsum(-1) - probabilities
            # The most likely token always stays, whatever the rounding.
            before[:, 0] = 0
            values = values.masked_fill(before >= params.top_p, -math.inf)
        scores.fill_(-math.inf).scatter_(1, index, values)
    if params.min_p > 0:
        scores.masked_fill_(scores < math.log(params.min_p), -math.inf)
    return complete


def _mass(scores: torch.Tensor) -> torch.Tensor:
    return scores.exp().sum(-1, keepdim=True, dtype=torch.float64)


def _largest(scores: torch.Tensor, top_k: int, sort: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `top_k` largest scores, or, if `top_k` is 0, candidates for a nucleus; descending, with indices.

    A nucleus is usually small, and finding a thousand candidates costs far less than sorting the vocabulary.
    """
    if top_k:
        return scores.topk(top_k, dim=-1)
    if scores.shape[1] > _WHOLE and not sort:
        return scores.topk(_NUCLEUS, dim=-1)
    return scores.sort(dim=-1, descending=True, stable=True)
