"""Sampling settings of requests that take effect (`gateway.sampling = "request"`).

Invariant: a setting that takes effect is applied in training too, where log-probabilities depend on it. Training scores
each token at its own temperature; it cannot truncate the distribution of single tokens, so `top_p`, `top_k` and `min_p`
are refused unless they keep every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from april.gateway.fields import number
from april.gateway.request import Request
from april.gateway.request_errors import RequestError
from april.rollout.sampling import COLDEST

HOTTEST = 2.0
"""Largest temperature, as in OpenAI's APIs."""
KEEPS_ALL: Mapping[str, tuple[Any, ...]] = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
"""Values with which a setting keeps every token."""


def with_temperature(request: Request) -> Request:
    """Return the request with its temperature as a setting of its turn.

    Raises:
        RequestError: engines do not sample at the temperature, or another setting cannot be applied in training.
    """
    for name, values in KEEPS_ALL.items():
        if (value := request.body.get(name)) is not None and value not in values:
            raise RequestError(
                f"Unsupported parameter: '{name}'. Tokens are trained on in the distribution that they are drawn from, "
                "and the trainer cannot truncate the distribution of one request. Leave it out.",
                code="unsupported_parameter",
                param=name,
            )
    temperature = number(request.body, "temperature", 0.0, HOTTEST)
    if temperature is not None and 0 < temperature < COLDEST:
        raise RequestError(
            f"Invalid 'temperature': expected 0, or a number from {COLDEST:g} to {HOTTEST:g}, got {temperature:g}.",
            param="temperature",
        )
    turn = replace(request.turn, temperature=temperature)
    ignored = [name for name in request.ignored if name != "temperature" and name not in KEEPS_ALL]
    return replace(request, turn=turn, ignored=ignored)
