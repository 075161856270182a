"""AReaL's workflow asked for its request, and given a finished response."""

from __future__ import annotations

from areal.api import ModelRequest, ModelResponse

from april.rollout.sampling import FinishReason
from april.rollout.trajectory import Sample


class Asked(BaseException):
    """A workflow has asked for its response. No workflow catches it by accident."""

    def __init__(self, request: ModelRequest) -> None:
        self.request = request


class Question:
    """Where a workflow expects AReaL's engine, to learn what it asks for."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        raise Asked(request)


class Finished:
    """A finished response, where a workflow asks AReaL's engine to generate one."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.asked = 0

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.asked += 1
        sample = self.sample
        if self.asked > 1:
            raise RuntimeError("the workflow asks for another turn: april generates one turn a sample")
        if tuple(request.input_ids) != tuple(sample.prompt_ids):
            raise RuntimeError("the workflow asks with another prompt than the first time: it has to be the same")
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=list(sample.response_ids),
            output_logprobs=sample.logprobs.tolist(),
            output_versions=sample.versions.tolist(),
            stop_reason="length" if sample.finish is FinishReason.LENGTH else "stop",
            tokenizer=request.tokenizer,
        )
