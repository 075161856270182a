"""TRL's `GRPOTrainer` with active partial rollouts.

Invariants:
- a training batch is N complete groups; the loss, the reward functions and the logs see the prompt and the columns of
  the completion's own row, never of the row that the dataloader requested;
- the policy ratio divides by the log-probabilities that tokens were drawn with, whichever version drew them; with
  `use_vllm` and its importance sampling correction, that correction does;
- evaluation generates for exactly the requested rows, without using the buffer;
- several processes are one job: one scheduler, one staleness bound, one set of metrics, one `april.json` in a
  checkpoint;
- the loss computes the images of a completion's own row, of files that the output directory keeps;
- a checkpoint of TRL includes all unfinished groups, and a resumed run trains on the same batches as the original run
  would have.

The trainer overrides TRL's private method `_generate_and_score_completions`, to pass it april's rows and to add the
log-probabilities to its output; for tools and environments also `_tool_call_loop` and `_calculate_rewards`.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from pathlib import Path
from typing import Any

import trl
from torch import Tensor

from april.algorithms.corrections import Diagnostics, correct, diagnostics
from april.integrations.peer_loss import peer_loss_reported
from april.integrations.trl.checkpoint import Checkpoint, read_state, resume_hint
from april.integrations.trl.episodes import completion
from april.integrations.trl.rollouts import TRLRollouts
from april.integrations.trl.settings import (
    PartialRollouts,
    partial_rollouts_of,
    refuse_arguments,
    refuse_images,
    refuse_model,
    with_vllm,
)
from april.integrations.trl.stored_images import images_of
from april.reporting.alarms import Alarms

__all__ = ["GRPOTrainer", "PartialRollouts"]

logger = logging.getLogger(__name__)


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[name-defined,misc]
    """TRL's trainer with partial rollouts. It takes all arguments of `trl.GRPOTrainer`.

    Args:
        partial_rollouts: settings of rollouts. The default is the embedded engine.

    Raises:
        ValueError: april does not support a setting of TRL.
    """

    def __init__(self, *args: Any, partial_rollouts: PartialRollouts | None = None, **kwargs: Any) -> None:
        settings = partial_rollouts_of(partial_rollouts)
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        refuse_arguments(given)
        config: Any = given.get("args")
        vllm = config is not None and config.use_vllm
        colocated = vllm and config.vllm_mode == "colocate"
        if vllm:
            settings = with_vllm(config, settings)
            config.use_vllm = False  # otherwise TRL sets up its own client, or vLLM before the model is checked
        super().__init__(*args, **kwargs)
        if vllm:
            # Restored, because TRL's importance sampling correction depends on it.
            self.args.use_vllm = self.use_vllm = True
        refuse_model(self, merged_by_trl=colocated)
        refuse_images(self, settings)
        self.rollouts = TRLRollouts(self, settings, colocated)
        self.rollout_func = self._completions
        self._logprobs: Tensor | None = None
        """Log-probabilities of the latest forward pass. `_compute_loss` cannot return them."""
        self._drift = Diagnostics.none()
        """Off-policy diagnostics of this process's samples since the last log."""
        self._alarms = Alarms()
        self.add_callback(Checkpoint(self.rollouts))
        # Scripts written for TRL's trainer never call `close`.
        weakref.finalize(self, self.rollouts.close)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training, rollouts = self.model.training, self.rollouts
        if training:
            rollouts.train(inputs, self.state.global_step)
            inputs = rollouts.inputs()
        else:
            rollouts.evaluate(inputs, self.state.global_step)
        rollouts.show(self)
        self._last_loaded_step = self.state.global_step  # with use_vllm: the server has these weights
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if training and not (self.use_vllm and self.vllm_importance_sampling_correction):
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logprobs = scores[0].detach()
        return scores

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        behaviour = inputs.get("sampling_per_token_logps")
        if self.model.training and behaviour is not None and self._logprobs is not None:
            mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
            correction = correct("rollout_logprobs", self._logprobs, self._logprobs, behaviour, mask)
            # Keep sums on the device until they are logged, so that no micro-batch synchronises with the GPU.
            self._drift = diagnostics(correction, self._logprobs, behaviour, mask) + self._drift.to(mask.device)
        return loss

    def _completions(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return the completions just generated for this process, as TRL's `rollout_func`."""
        parts = [completion(sample) for _, sample in self.rollouts.rows]
        assert len(parts) == len(prompts), "TRL requested completions of other rows than it was given"
        prompt_ids, completion_ids, logprobs, _ = map(list, zip(*parts, strict=True))
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Return TRL's completions with the images of their prompts, which TRL leaves out with a `rollout_func`."""
        *before, images, of_tools = super()._generate(prompts)
        if self.rollouts.images is not None and images is None:
            # TRL's processors take an empty list for a prompt without images, and not None.
            found = [[] if isinstance(prompt, str) else images_of(prompt) for prompt in prompts]
            images = found if any(found) else None
        return *before, images, of_tools

    def _tool_call_loop(self, *given: Any, **more: Any) -> Any:
        """Return april's episodes, which have already called the tools."""
        assert self.rollouts.episodes is not None
        return self.rollouts.episodes.played(self.rollouts.rows)

    def _calculate_rewards(self, *given: Any, **more: Any) -> Any:
        """Compute TRL's rewards with the environments of the completions."""
        if self.rollouts.episodes is not None and self.environment_factories is not None:
            self.environments = self.rollouts.episodes.environments
        return super()._calculate_rewards(*given, **more)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. A checkpoint restores the groups that were unfinished when it was written.

        Raises:
            SystemExit: another process of the job has ended. The first process that notices prints how to resume.
        """
        job = self.rollouts.job
        try:
            with peer_loss_reported(job, lambda what: resume_hint(Path(self.args.output_dir), what)):
                state = read_state(resume_from_checkpoint, self.args.output_dir) if job.leads else None
                self.rollouts.load_state_dict(state)
                return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.rollouts.loaded = None  # TRL may have loaded the best checkpoint, or may count steps from 0 again

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with april's metrics of the rollouts since the last call under `april/`.

        `april/ess` and `april/kl_behaviour` cover the samples of process 0. The alarms of `april train` are logged as
        warnings.
        """
        if self.model.training and self.rollouts.job.leads:
            measured = self.rollouts.take_metrics()
            taken, self._drift = self._drift.metrics(), Diagnostics.none()
            if taken["tokens"]:
                measured |= {"ess": taken["ess"], "kl_behaviour": taken["kl_k3"]}
            for warning in self._alarms.observe({**logs, **measured}):
                logger.warning(warning)
            logs.update({f"april/{name}": value for name, value in measured.items()})
        super().log(logs, start_time)

    def close(self) -> None:
        """Stop the engine, and the servers that april started. This also happens when the program ends."""
        self.rollouts.close()
