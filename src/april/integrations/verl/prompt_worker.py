"""verl's agent-loop worker, which processes the images of a row once, in a thread, and not for each response."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from april.integrations.verl.images import RowImages


class PromptWorker(AgentLoopWorkerTQ.__ray_actor_class__):  # type: ignore[misc]
    """verl's worker in april's process: it tokenizes prompts, scores samples and writes trajectories."""

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        await self._process_images(outputs)
        await super()._compute_score(outputs, kwargs)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        await self._process_images(output)
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _process_images(self, outputs: list[AgentLoopOutput]) -> None:
        for output in outputs:
            images = images_of(output)
            if isinstance(images, RowImages) and images.inputs is None:
                token_ids = torch.tensor([*output.prompt_ids, *output.response_ids])
                await asyncio.to_thread(self._compute_multi_modal_inputs, output, token_ids)

    def _compute_multi_modal_inputs(self, output: AgentLoopOutput, input_ids: torch.Tensor) -> dict[str, Any]:
        images = images_of(output)
        if not isinstance(images, RowImages):
            return dict(super()._compute_multi_modal_inputs(output, input_ids))
        with images.lock:
            if images.inputs is None:
                # Of the text, only the kinds of its tokens are in the result, and verl uses no more than their
                # presence.
                images.inputs = super()._compute_multi_modal_inputs(output, input_ids)
        return dict(images.inputs)  # verl removes items


def images_of(output: AgentLoopOutput) -> Any:
    """Return the images of a trajectory; None if it has none."""
    return (output.multi_modal_data or {}).get("images")
