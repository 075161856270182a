"""Engines that stand in for AReaL's when april runs a workflow."""

from __future__ import annotations

from collections.abc import Callable

from areal.api import ModelRequest, ModelResponse

from april.integrations.generating_code import CodeEpisode


class RequestMade(BaseException):
    """Carries a workflow's request out of it. A workflow that catches `Exception` does not catch this."""

    def __init__(self, request: ModelRequest) -> None:
        self.request = request


class RequestCapture:
    """An engine that ends the workflow at its first request."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        raise RequestMade(request)


class EpisodeEngine:
    """AReaL's engine, for the workflow of one episode.

    Args:
        check: raises an error for a request that april cannot draw a response to.
        version: returns AReaL's version of the weights.
    """

    def __init__(self, episode: CodeEpisode, check: Callable[[ModelRequest], None], version: Callable[[], int]) -> None:
        self._episode = episode
        self._check = check
        self._version = version

    def get_version(self) -> int:
        return self._version()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self._check(req)
        asked = list(req.input_ids)
        limit = min(req.gconfig.max_new_tokens, req.gconfig.max_tokens - len(asked))
        turn = await self._episode.respond(asked, limit)
        return ModelResponse(
            input_tokens=asked,
            output_tokens=list(turn.response),
            output_logprobs=list(turn.logprobs),
            output_versions=list(turn.versions),
            stop_reason=turn.end,
            tokenizer=req.tokenizer,
        )
