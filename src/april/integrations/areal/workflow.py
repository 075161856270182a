"""Engines that stand in for AReaL's when april runs a workflow.

april runs each workflow twice: once to learn the request that it would send, and once with the finished response, which
it scores.
"""

from __future__ import annotations

from areal.api import ModelRequest, ModelResponse

from april.integrations.finished_response import FinishedResponse
from april.rollout.trajectory.sample import Sample


class RequestMade(BaseException):
    """Carries a workflow's request out of it. A workflow that catches `Exception` does not catch this."""

    def __init__(self, request: ModelRequest) -> None:
        self.request = request


class RequestCapture:
    """An engine that ends the workflow at its first request."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        raise RequestMade(request)


class WorkflowResponse(FinishedResponse):
    """An engine that returns a finished response."""

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample, "the workflow")

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        sample = self.response_to(request.input_ids)
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=list(sample.response_ids),
            output_logprobs=sample.logprobs.tolist(),
            output_versions=sample.versions.tolist(),
            stop_reason=self.stop_reason,
            tokenizer=request.tokenizer,
        )
