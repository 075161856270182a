"""Engines that stand in for AReaL's when april runs a workflow, and the tensors of the workflow's result.

A workflow calls the engine itself, or through AReaL's client `ArealOpenAI`, which renders messages to tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from areal.api import ModelRequest, ModelResponse
from areal.experimental.openai import InteractionWithTokenLogpReward
from areal.utils.data import concat_padded_tensors

from april.engines.servers.server_routes import ServerRoutes
from april.integrations.generating_code import CodeEpisode, DrawnTurn, LeftOutError, stop_strings
from april.integrations.routes import whole_routes


class RequestMade(BaseException):
    """Carries a workflow's request out of it. A workflow that catches `Exception` does not catch this."""

    def __init__(self, request: ModelRequest) -> None:
        self.request = request


class RequestCapture:
    """An engine that ends the workflow at its first request."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        raise RequestMade(request)


class Response(ModelResponse):  # type: ignore[misc]
    """AReaL's response."""

    stop_string: str | None = None
    """The stop string that ended the response."""

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """Tokens without the end token. Tokens of a stop string stay, where AReaL's own property raises an error.

        Raises:
            LeftOutError: there are only end tokens. AReaL rejects the episode.
        """
        if self.stop_string is not None:
            return list(self.output_tokens)
        try:
            return list(super().output_tokens_without_stop)
        except ValueError as error:
            raise LeftOutError(f"AReaL's client: {error}") from error


class EpisodeEngine:
    """AReaL's engine, for the workflow of one episode.

    Args:
        check: raises an error for a request that april cannot draw a response to.
        version: returns AReaL's version of the weights.
        routes: shape of the routes that responses have; None without router replay.
    """

    def __init__(
        self,
        episode: CodeEpisode,
        check: Callable[[ModelRequest], None],
        version: Callable[[], int],
        routes: ServerRoutes | None = None,
    ) -> None:
        self._episode = episode
        self._check = check
        self._version = version
        self._routes = routes

    def get_version(self) -> int:
        return self._version()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self._check(req)
        asked = list(req.input_ids)
        limit = min(req.gconfig.max_new_tokens, req.gconfig.max_tokens - len(asked))
        turn = await self._episode.respond(asked, limit, stop_strings(req.gconfig.stop))
        response = Response(
            input_tokens=asked,
            output_tokens=list(turn.response),
            output_logprobs=list(turn.logprobs),
            output_versions=list(turn.versions),
            stop_reason=turn.end,
            tokenizer=req.tokenizer,
            routed_experts=self._routed_experts(turn),
        )
        response.stop_string = turn.stop
        return response

    def _routed_experts(self, turn: DrawnTurn) -> Any:
        """Return the routes of prompt and response as AReaL has them, [tokens - 1, layers · top k]."""
        if self._routes is None:
            return None
        whole = whole_routes(turn.routes, len(turn.token_ids), self._routes)
        return whole.reshape(len(whole), -1)


def tensors_of(episode: CodeEpisode, made: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a workflow's result, each with a row per sequence.

    Interactions of AReaL's client are converted as AReaL does, but without loss on tokens that the policy did not draw:
    the client joins turns with an end-of-sequence token, also where the policy ended a turn with a padding token.

    Raises:
        RuntimeError: the result has other values.
        ObservationError: the loss counts a token that the policy did not draw.
    """
    interactions = all(isinstance(value, InteractionWithTokenLogpReward) for value in made.values())
    if interactions and all(value.has_tensor_data for value in made.values()):
        made = concat_padded_tensors([value.to_tensor_dict() for value in made.values()])
    if not all(isinstance(value, torch.Tensor) for value in made.values()):
        raise RuntimeError("the workflow returned values that are not tensors: april takes tensors of sequences")
    for ids, mask, real in zip(made["input_ids"], made["loss_mask"], made["attention_mask"], strict=True):
        tokens = ids[real.bool()].tolist()
        if interactions:
            drawn = episode.drawn_in(tokens)
            mask[: len(tokens)] *= torch.tensor([place in drawn for place in range(len(tokens))])
        else:
            episode.check(tokens, mask[real.bool()].bool().tolist())
    return made
