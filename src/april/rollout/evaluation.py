"""Evaluation: the rollout loop over a fixed set of prompts, without rewards, admission or a journal.

An evaluation shares the engine with the rollouts, and touches none of their samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from april.rollout.admission.fixed import FixedAdmission
from april.rollout.admission.lengths import LengthModel
from april.rollout.episodes.episodes import Episodes
from april.rollout.generation.in_flight import SharedEngine
from april.rollout.history import History
from april.rollout.loop import RolloutLoop
from april.rollout.params import FaultSettings, RolloutParams
from april.rollout.prompt_source import PromptSource
from april.rollout.sampling import SamplingParams
from april.rollout.state import RolloutState
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt


async def evaluate(
    shared: SharedEngine,
    prompts: Sequence[Prompt],
    n_samples: int,
    sampling: SamplingParams,
    seed: int,
    version: int,
    faults: FaultSettings,
    episodes: Episodes | None = None,
) -> list[Group]:
    """Return complete, unrewarded groups for `prompts`, in their order. If that fails, nothing of them is left in the
    engine.

    Args:
        version: the policy version of the engine's weights.
        episodes: environments for these samples alone; closed in the end.

    Raises:
        EngineError: the engine failed, or a request failed more often than `faults` allows.
        EpisodeError: an environment failed more often than its limits allow.
    """
    if not prompts:
        return []
    params = RolloutParams(
        rollout_batch_size=len(prompts),
        over_sampling_batch_size=len(prompts),
        n_samples_per_prompt=n_samples,
        max_staleness=None,
    )
    lengths, admission = LengthModel(sampling.max_tokens), FixedAdmission(len(prompts))
    state = RolloutState(params, lengths, admission, filtered=False, scored=False, evaluation=True)
    state.engine_version = version
    source = PromptSource(prompts, n_samples, sampling, seed, journalled=False)
    with shared.another_user() as in_flight:
        # An evaluation needs every prompt, so the first group that is given up ends it.
        loop = RolloutLoop(shared, in_flight, History(state, None), source, None, faults, episodes, give_up_limit=1)
        loop.start_step()
        try:
            while len(state.ready) < len(prompts):
                await loop.settle()
                loop.fill()
                if not loop.stalled:
                    await loop.poll()
        finally:
            try:
                await loop.close()
            finally:
                # Interrupted samples of a failed evaluation may keep their KV caches, and never resume.
                shared.engine.forget([sample.id for group in state.buffer for sample in group.samples])
    return list(state.buffer)
