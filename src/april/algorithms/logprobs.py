"""Log-probabilities of given tokens, and the entropy of the distributions they were drawn from.

Invariants:
- the distribution is softmax(logits / temperature), in `token_logprobs` renormalised over the tokens that a truncation
  keeps: the distribution that engines record log-probabilities of. It is computed in float32 from logits of any
  precision;
- `token_logprobs` never holds more than one chunk of logits, forward or backward; its values and gradients equal those
  of `logprobs_from_logits` on all positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from april.algorithms.truncation import WHOLE, Truncation

CHUNK_ELEMENTS = 1 << 26
"""Default number of logits in a chunk: 256 MiB in float32."""


def logprobs_from_logits(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy (nats) under softmax(logits / temperature), both with gradient, in float32.

    Args:
        logits: [..., V].
        targets: token ids, [...].
        temperature: positive; a number, or one per position, [...].
    """
    scaled = logits.float() / _column(temperature)
    log_p = scaled.log_softmax(-1)
    return log_p.gather(-1, targets[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    truncation: Truncation = WHOLE,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy (nats) under softmax(logits / temperature), without materialising all logits.

    logits = hidden @ weight.T + bias, in the precision of `weight` like the model's own head; all else is float32. The
    backward pass recomputes each chunk's logits. Gradients flow to `hidden`, `weight` and `bias`.

    Args:
        hidden: last hidden states, [N, D]; pass only the positions that predict a trained token.
        weight: weight of the language-model head, [V, D].
        targets: token ids, [N].
        temperature: positive; a number, or one per position, [N]. Pass 1 for greedy tokens (temperature 0): engines
            record log-probabilities at temperature 1 for them.
        chunk_size: positions whose logits are held at a time; None keeps them under `CHUNK_ELEMENTS`.
        bias: bias of the head, [V].
        softcap: apply softcap · tanh(logits / softcap) to the logits (`final_logit_softcapping` of Gemma 2).
        truncation: truncation that tokens were sampled with; it sorts the vocabulary at each position and always keeps
            the targets.

    Returns:
        log-probabilities [N] and entropies [N], float32.

    Raises:
        ValueError: shapes do not match, or a temperature is not positive.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden is {list(hidden.shape)}, weight {list(weight.shape)}: must be [N, D] and [V, D]")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets is {list(targets.shape)}: must be one token id per row of hidden, [{len(hidden)}]")
    if not isinstance(temperature, Tensor) and temperature <= 0:
        raise ValueError(f"temperature = {temperature}: must be positive (tokens drawn greedily are scored at 1)")
    rows = chunk_size or max(1, CHUNK_ELEMENTS // len(weight))
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(targets.shape)
    # With autocast enabled, the forward and backward passes would compute different logits.
    with torch.autocast(hidden.device.type, enabled=False):
        logp, entropy = _ChunkedLogprobs.apply(
            hidden.to(weight.dtype), weight, bias, targets, temperatures, rows, softcap, truncation
        )
    return logp, entropy


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        rows: int,
        softcap: float | None,
        truncation: Truncation,
    ) -> tuple[Tensor, Tensor]:
        logp = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(logp)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits, _ = _scaled_logits(hidden[part], weight, bias, temperatures[part], softcap)
            if truncation:
                logits = truncation.apply(logits, targets[part])
            # In place, so that a chunk is held twice at most: its log-probabilities and their exponentials.
            log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
            logp[part] = log_p.gather(-1, targets[part, None]).squeeze(-1)
            entropy[part] = -torch.linalg.vecdot(log_p.exp(), log_p)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, entropy)
        ctx.rows, ctx.softcap, ctx.truncation = rows, softcap, truncation
        # An unused entropy then has gradient None instead of zeros, and its part of the backward pass is skipped.
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        # Accumulate over chunks in float32: bfloat16 would round small contributions to 0.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            scale = temperatures[part, None]
            logits, slope = _scaled_logits(hidden[part], weight, bias, temperatures[part], ctx.softcap)
            if ctx.truncation:
                logits = ctx.truncation.apply(logits, targets[part])
            log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
            p = log_p.exp()
            # d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
            if grad_entropy is None:
                grad = p
            else:
                grad = log_p.add_(entropy[part, None]).mul_(p).mul_(-grad_entropy[part, None])
                if grad_logp is not None:
                    grad.addcmul_(p, grad_logp[part, None], value=-1)
            if grad_logp is not None:
                if grad_entropy is None:
                    grad = grad.mul_(-grad_logp[part, None])
                grad.scatter_add_(-1, targets[part, None], grad_logp[part, None])
            grad = grad.div_(scale)
            if slope is not None:
                grad = grad.mul_(slope)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            # addmm_ needs equal types; in half precision each chunk's product is cast as it is added.
            if grad_weight is not None and grad.dtype == wide:
                grad_weight.addmm_(grad.T, hidden[part])
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return a chunk's logits / temperature in float32, [rows, V], and the slope of the softcap, [rows, V] or None."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    slope = None
    if softcap is not None:
        bounded = logits.div_(softcap).tanh_()
        # d (c tanh(x / c)) / dx = 1 - tanh(x / c)²
        slope = 1 - bounded.square()
        logits = bounded * softcap
    return logits.div_(temperatures[:, None]), slope


def _column(temperature: float | Tensor) -> float | Tensor:
    return temperature[..., None] if isinstance(temperature, Tensor) and temperature.dim() else temperature
