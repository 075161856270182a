"""Finished responses for the framework's own code that would generate them.

A framework often scores a response in the code that also generates it: an agent loop, a workflow, an executor. april
runs that code once the response is finished, and puts a `FinishedResponse` in the place of its engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from april.rollout.sampling import FinishReason
from april.rollout.trajectory.sample import Sample


class FinishedResponse:
    """A finished sample, returned once as the response to its own prompt.

    Args:
        sample: the finished sample.
        caller: the framework's name for the code that requests the response, for error messages.
    """

    def __init__(self, sample: Sample, caller: str) -> None:
        self.sample = sample
        self._caller = caller
        self._returned = False

    def response_to(self, prompt_ids: Sequence[int]) -> Sample:
        """Return the sample.

        Raises:
            RuntimeError: this is the second request, or its prompt is not the sample's.
        """
        if self._returned:
            raise RuntimeError(f"{self._caller} asks for another turn: april generates one turn a sample")
        self._returned = True
        if tuple(prompt_ids) != tuple(self.sample.prompt_ids):
            raise RuntimeError(f"{self._caller} made another prompt than the first time: it must make the same one")
        return self.sample

    @property
    def stop_reason(self) -> Literal["length", "stop"]:
        """Why the response ended, as vLLM and SGLang name it."""
        return "length" if self.sample.finish is FinishReason.LENGTH else "stop"
