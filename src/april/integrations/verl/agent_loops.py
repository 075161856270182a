"""verl's agent loops as april's episodes.

An agent loop takes the place of an environment: the new tokens of each of its requests are an observation, and the
response that it receives is a turn of april's.

Invariants:
- verl's own code creates and runs one loop per sample; turns are interrupted and resumed without the loop's knowledge;
- each request starts with all earlier tokens unchanged; a loop that sends another request has failed;
- tokens and log-probabilities of a trajectory are april's; other fields of a loop's output are kept with the sample.
  The mask may exclude sampled tokens, but never includes tokens that no policy sampled;
- a loop that was lost in a restart runs again and receives the recorded turns.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from april.integrations.generating_code import UNLIMITED
from april.rollout.episodes.environment import Environment, EnvStep, Observation, ObservationError, Said, TokenIds, Turn
from april.rollout.episodes.environment_episodes import EnvironmentEpisodes
from april.rollout.episodes.turn_places import common_prefix
from april.rollout.params import EpisodeLimits
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)

TRACE_INFO: Mapping[str, Any] = {"step": -1, "sample_index": -1, "rollout_n": 0, "validate": False}


class AgentLoops:
    """Running agent loops.

    Args:
        worker: verl's agent-loop worker, which holds the tools and the tokenizer.
        rows: the dataset rows of the prompts in flight, by prompt id.
        sampling_params: verl's sampling parameters, which every loop receives. The stop tokens that the loops request
            are added to this dictionary.
    """

    def __init__(self, worker: Any, rows: Mapping[str, Mapping[str, Any]], sampling_params: dict[str, Any]) -> None:
        self._worker = worker
        self._rows = rows
        self.sampling_params = sampling_params
        self._base_params = dict(sampling_params)
        self._ended: dict[str, AgentLoopEpisode] = {}
        """Episodes that have ended, by sample id."""

    def episodes(self, context_length: int) -> EnvironmentEpisodes:
        """Return the scheduler's episodes: without time limits, as in verl; a loop that fails rejects its group."""
        limits = EpisodeLimits(
            recovery="replay", on_error="reject", concurrency=UNLIMITED, reset_timeout=None, step_timeout=None
        )

        def row(prompt: Prompt) -> dict[str, Any]:
            return dict(self._rows[prompt.id])

        def keep_ended(sample_id: str, environment: Environment) -> None:
            assert isinstance(environment, AgentLoopEpisode)
            self._ended[sample_id] = environment

        return EnvironmentEpisodes(lambda: AgentLoopEpisode(self), NoText(), context_length, limits, row, keep_ended)

    async def output(self, prompt: Prompt, sample: Sample) -> AgentLoopOutput | None:
        """Return the output of a finished sample's loop, or None if the loop does not end with this sample."""
        episode = self._ended.pop(sample.id, None)
        try:
            if episode is None:
                episode = await self._rerun(prompt, sample)
            output = await episode.end(sample.turn_ids(sample.turns))
        except Exception as error:  # the sample is trained on without the loop's output
            log.warning("an agent loop failed at its end: %s: %s", type(error).__name__, error)
            return None
        same = output is not None and [*output.prompt_ids, *output.response_ids] == sample.response_ids
        return output if same else None

    async def _rerun(self, prompt: Prompt, sample: Sample) -> AgentLoopEpisode:
        """Run a loop again that was lost in a restart after its last request."""
        episode = AgentLoopEpisode(self)
        await episode.reset(self._rows[prompt.id], 0)
        for index in range(sample.turns):
            await episode.step(Turn(sample.id, index, "", sample.turn_ids(index)))
        return episode

    def keep(self, sample_ids: Collection[str]) -> None:
        """Stop the ended loops of all other samples."""
        for id in [id for id in self._ended if id not in sample_ids]:
            self._ended.pop(id).stop()

    async def run(self, client: AgentLoopEpisode, row: Mapping[str, Any]) -> AgentLoopOutput:
        """Run the agent loop that a row names, as verl's worker does."""

        # Replaces verl's post-processing, which writes trajectories: april does that when the group is handed over.
        async def returned(output: Any, validate: bool, **_: Any) -> Any:
            return output

        # A shallow copy per loop: tools and tokenizer are shared, client and post-processing belong to the loop.
        worker = copy.copy(self._worker)
        worker.llm_client = client
        worker._agent_loop_postprocess = returned
        output = await worker._run_agent_loop(dict(self._base_params), TRACE_INFO, trace=False, **row)
        if not isinstance(output, AgentLoopOutput):
            raise ObservationError(f"the agent loop returned a {type(output).__name__}: april takes one trajectory")
        return output

    def adopt(self, sampling_params: Mapping[str, Any]) -> None:
        """Adopt the stop tokens that a loop requests.

        Raises:
            ObservationError: its sampling parameters differ from the other loops'.
        """
        requested = dict(sampling_params)
        stops = sorted(requested.pop("stop_token_ids", ()) or ())
        mine = self.sampling_params
        # The first loop that names stop tokens decides them for all, because turns are sampled alike.
        if requested != self._base_params or stops != sorted(mine.get("stop_token_ids", stops)):
            raise ObservationError(
                f"the agent loop requests {dict(sampling_params)} where turns are sampled with {mine}: april samples "
                "all turns of a run alike; set it under actor_rollout_ref.rollout"
            )
        if stops:
            mine["stop_token_ids"] = stops


class NoText:
    """Bridge for episodes that exchange tokens only."""

    def begin(self, prompt: Prompt, observation: Observation) -> None:
        return None

    def read(self, token_ids: Sequence[int]) -> Said:
        return Said("")

    def extend(self, sample: Sample, observation: Observation) -> None:
        return None


class AgentLoopEpisode:
    """A running agent loop. The loop uses this object as verl's LLM client."""

    def __init__(self, loops: AgentLoops) -> None:
        self._loops = loops
        self._run: asyncio.Task[AgentLoopOutput] | None = None
        self._request: asyncio.Future[list[int]]
        self._answer: asyncio.Future[TokenOutput] | None = None
        self._token_ids: list[int] = []
        """Tokens of prompt and response so far."""
        self._mask: list[int] = []
        """1 for each token that the policy sampled."""
        self._prompt = 0
        """Number of prompt tokens."""

    async def reset(self, prompt: Mapping[str, Any], seed: int) -> TokenIds:
        """Start the loop and return the prompt of its first request."""
        loop = asyncio.get_running_loop()
        self._request = loop.create_future()
        self._run = loop.create_task(self._loops.run(self, prompt), name="agent loop")
        new = await self._next()
        if new is None:
            raise ObservationError("the agent loop ended before its first request")
        self._prompt = len(new)
        return new

    async def step(self, turn: Turn) -> EnvStep:
        new = await self._pass_turn(turn.token_ids, "completed")
        if new is not None:
            return EnvStep(new)
        assert self._run is not None
        self._check(self._run.result())
        return EnvStep(done=True)

    async def end(self, token_ids: Sequence[int]) -> AgentLoopOutput | None:
        """Return the loop's output; a last turn that used up the token budget is passed to the loop first."""
        assert self._run is not None
        if not self._run.done() and token_ids:
            await self._pass_turn(token_ids, "length")
        if not self._run.done():
            self.stop()
            return None
        self._check(self._run.result())
        return self._run.result()

    def stop(self) -> None:
        if self._run is not None:
            self._run.cancel()

    async def close(self) -> None:
        """Keep the loop: its output is needed later."""

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Answer a loop's request with a turn."""
        if any(kwargs.get(f"{kind}_data") for kind in ("image", "video", "audio")):
            raise ObservationError("the agent loop's request has images, video or audio, which april does not")
        if self._request.done():
            raise ObservationError("the agent loop sent a second request before the first was answered")
        self._loops.adopt(sampling_params)
        self._answer = asyncio.get_running_loop().create_future()
        self._request.set_result(list(prompt_ids))
        return await self._answer

    async def _pass_turn(self, token_ids: Sequence[int], reason: str) -> TokenIds | None:
        """Pass a turn to the loop and return the new tokens of its next request, or None if the loop has ended."""
        self._token_ids += token_ids
        self._mask += [1] * len(token_ids)
        answer, self._answer = self._answer, None
        assert answer is not None, "the agent loop has no open request"
        self._request = asyncio.get_running_loop().create_future()
        answer.set_result(TokenOutput(token_ids=list(token_ids), stop_reason=reason))
        return await self._next()

    async def _next(self) -> TokenIds | None:
        assert self._run is not None
        await asyncio.wait({self._run, self._request}, return_when=asyncio.FIRST_COMPLETED)
        if self._run.done():
            self._run.result()
            return None
        requested, known = self._request.result(), self._token_ids
        if requested[: len(known)] != known:
            same = common_prefix(requested, known)
            raise ObservationError(f"the agent loop's request changes token {same} of the {len(known)} before it")
        new = TokenIds(requested[len(known) :])
        self._token_ids += new
        self._mask += [0] * len(new)
        return new

    def _check(self, output: AgentLoopOutput) -> None:
        """Check that a loop returned the sampled tokens and masks no others."""
        returned, mask, sampled = [*output.prompt_ids, *output.response_ids], output.response_mask, self._mask
        if returned != self._token_ids or len(output.prompt_ids) != self._prompt:
            raise ObservationError(
                f"the agent loop returned {len(returned)} tokens that are not the {len(sampled)} of its turns"
            )
        if any(own > drawn for own, drawn in zip(mask, sampled[self._prompt :], strict=True)):
            raise ObservationError("the agent loop's mask has tokens that no policy sampled")
