"""SkyRL's agent loops as the programs of april's episodes.

Invariants:
- SkyRL's own code makes the prompts, steps the environments, and computes masks, rewards and log-probabilities: a
  trajectory is what SkyRL's generator returns for the same tokens;
- each request of a loop is a turn of april's, with the request's tokens as its prompt;
- a loop that was lost in a restart runs again with a new environment, and receives the recorded turns.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from skyrl.backends.skyrl_train.utils.routed_experts import compact_routed_expert_indices
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator, StepWiseOutput, TrajectoryOutput

from april.disk import as_json
from april.engines.servers.server_routes import ServerRoutes
from april.integrations.generating_code import CodeEpisode, DrawnTurn, GeneratingCode, result_of
from april.integrations.routes import whole_routes
from april.rollout.episodes.environment import ObservationError
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample

TRAJECTORIES = "trajectories"
"""Key in the information of an episode's end: its trajectories, of which there are several with step-wise training."""
KEPT = ("prompt_ids", "response_ids", "reward", "stop_reason", "loss_mask", "rollout_logprobs", "env_metrics")
"""Fields of a trajectory that are kept."""
ROWS = "routed_rows"
"""Key in a trajectory that is kept: number of its tokens with routes, which are the sample's."""


class TurnClient:
    """Takes the place of the inference client that a loop calls.

    Args:
        episode: draws the turns of the loop.
        client: SkyRL's inference client.
        max_tokens: tokens of a turn.
        max_turns: turns for which the sample has a token budget.
        routes: shape of the routes that turns have; None without router replay.
    """

    def __init__(
        self,
        episode: CodeEpisode,
        client: Any,
        max_tokens: int,
        max_turns: int | None,
        routes: ServerRoutes | None = None,
    ) -> None:
        self._episode = episode
        self._client = client
        self._max_tokens = max_tokens
        self._max_turns = max_turns
        self._routes = routes

    async def generate(self, request: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
        if self._max_turns is not None and len(self._episode.turns) >= self._max_turns:
            raise ObservationError(
                f"the environment asks for another turn where generator.max_turns = {self._max_turns}: raise it"
            )
        (prompt,) = request["prompt_token_ids"]
        turn = await self._episode.respond(prompt, self._max_tokens)
        ids = list(turn.response)  # a copy, because the loop appends to it
        return {
            "responses": await self._client.detokenize([ids]),
            "response_ids": [ids],
            "stop_reasons": [turn.end],
            "response_logprobs": [list(turn.logprobs)],
            **({} if self._routes is None else self._routed(request, turn, self._routes)),
        }

    @staticmethod
    def _routed(request: Mapping[str, Any], turn: DrawnTurn, shape: ServerRoutes) -> dict[str, Any]:
        """Return the routes of a turn from the token on from which the loop asks for them."""
        (start,) = request.get("routed_experts_prompt_starts") or [0]
        whole = whole_routes(turn.routes, len(turn.token_ids), shape)
        return {"rollout_expert_indices": [compact_routed_expert_indices(whole[start:])]}

    async def finish_session(self, session_id: str) -> None:
        """The servers hold nothing for a session."""


class AgentLoops:
    """Runs SkyRL's agent loop, or its batched generation, for each sample.

    Args:
        generator: SkyRL's generator, with its environments, tokenizer and settings.
        stop_token_ids: tokens that end a turn.
        context_length: tokens of prompt and responses together.
        routes: shape of the routes that turns have; None without router replay.

    Attributes:
        code: the loops as april's programs.
        budget: tokens that the policy may sample in one sequence. Of several turns, only the context limits the sum.
    """

    def __init__(
        self,
        generator: SkyRLGymGenerator,
        stop_token_ids: Sequence[int],
        context_length: int,
        routes: ServerRoutes | None = None,
    ) -> None:
        self._generator = generator
        self._routes = routes
        # SkyRL's loop reads the text of a turn by this tokenizer.
        decode = generator.tokenizer.decode if self.stops else None
        self.code = GeneratingCode(self._run, stop_token_ids, context_length, decode)
        self.budget = self._turn_tokens if self._max_turns == 1 else context_length

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of each turn."""
        return tuple(self._generator.generator_cfg.sampling_params.stop or ())

    @property
    def _turn_tokens(self) -> int:
        tokens: int = self._generator.generator_cfg.sampling_params.max_generate_length
        return tokens

    @property
    def _max_turns(self) -> int | None:
        """1 if the budget is one turn's, else None: SkyRL leaves the number of turns to the environment."""
        return 1 if self._generator.max_turns == 1 else None

    async def _run(self, episode: CodeEpisode) -> Mapping[str, Any]:
        kept = [self._kept(one) for one in await self._trajectories(episode)]
        made: dict[str, Any] = json.loads(as_json({TRAJECTORIES: kept}))
        return made

    def _kept(self, trajectory: TrajectoryOutput) -> dict[str, Any]:
        kept = {name: getattr(trajectory, name) for name in KEPT}
        if (indices := trajectory.rollout_expert_indices) is not None:
            kept[ROWS] = len(indices)
        return kept

    async def _trajectories(self, episode: CodeEpisode) -> Sequence[TrajectoryOutput]:
        # A shallow copy, because loops run concurrently and each copy has its own client.
        loop = copy.copy(self._generator)
        client = self._generator.inference_engine_client
        loop.inference_engine_client = TurnClient(episode, client, self._turn_tokens, self._max_turns, self._routes)
        row = episode.row
        given = copy.deepcopy((row["prompt"], row["env_class"], row["env_extras"]))
        if loop.batched:
            return [await _batch_of_one(loop, *given, self._turn_tokens)]
        output = await SkyRLGymGenerator.agent_loop(
            loop,
            *given,
            self._turn_tokens,
            loop.generator_cfg.max_input_length,
            trajectory_id=TrajectoryID(row["uid"], episode.index),
        )
        return output.step_outputs if isinstance(output, StepWiseOutput) else [output]


async def reward(prompt: Prompt, sample: Sample) -> Reward:
    """Return the sum of an episode's rewards, for april's metrics and SkyRL's filter."""
    return Reward(float(sum(np.sum(kept["reward"]) for kept in result_of(sample)[TRAJECTORIES])))


def output_of(sample: Sample, step_wise: bool, routes: ServerRoutes | None = None) -> TrajectoryOutput | StepWiseOutput:
    """Return what SkyRL's agent loop returned for an episode, given the sample that it ended with.

    Args:
        routes: shape of the routes; None without router replay.
    """
    trajectories = [_restored(kept, sample, routes) for kept in result_of(sample)[TRAJECTORIES]]
    if step_wise:
        return StepWiseOutput(step_outputs=trajectories)
    (trajectory,) = trajectories
    return trajectory


def _restored(kept: Mapping[str, Any], sample: Sample, routes: ServerRoutes | None) -> TrajectoryOutput:
    fields = dict(kept)
    rows = fields.pop(ROWS, 0)
    trajectory = TrajectoryOutput(**fields)
    if routes is not None and rows:
        # SkyRL combines routes with neither step-wise training nor templates that render responses again, so the
        # sample's tokens are the trajectory's as far as the servers consumed them.
        assert [*sample.prompt_ids, *sample.response_ids][:rows] == [*kept["prompt_ids"], *kept["response_ids"]][:rows]
        trajectory.rollout_expert_indices = compact_routed_expert_indices(whole_routes(sample.routes, rows + 1, routes))
    return trajectory


async def _batch_of_one(
    loop: SkyRLGymGenerator, prompt: Any, env_class: str, env_extras: Any, length: int
) -> TrajectoryOutput:
    """Run SkyRL's batched generation, which is one turn without an agent loop, on a single sample."""
    metrics: dict[str, Any] = {}
    run = loop._run_in_executor_if_available

    async def observed(method: Callable[..., Any], *args: Any) -> Any:
        # SkyRL returns the metrics of environments as means only.
        if method.__name__ == "close":
            metrics.update(method.__self__.get_metrics())  # type: ignore[attr-defined]
        return await run(method, *args)

    loop._run_in_executor_if_available = observed
    made = await SkyRLGymGenerator.generate_batched(loop, [prompt], [env_class], [env_extras], length)
    return TrajectoryOutput(
        prompt_ids=made["prompt_token_ids"][0],
        response_ids=made["response_ids"][0],
        reward=made["rewards"][0],
        stop_reason=made["stop_reasons"][0],
        loss_mask=made["loss_masks"][0],
        rollout_logprobs=made["rollout_logprobs"][0],
        env_metrics=metrics,
        rollout_expert_indices=(made.get("rollout_expert_indices") or [None])[0],
    )
