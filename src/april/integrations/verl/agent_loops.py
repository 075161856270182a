"""verl's agent loops, played as april's episodes.

Invariants:
- a loop is made and run by verl's own code, once for each sample. What it asks for is what an environment says, and
  what it is answered is a turn of april's, which is interrupted and resumed without its knowledge;
- a request holds all tokens before it as they are, and only those behind them are new; a loop that asks for another
  thing has failed;
- tokens and log-probabilities of a trajectory are april's. The rest of what a loop returns is kept with it, its mask
  too: it may leave out what was sampled, and holds nothing else;
- a loop that a restart has lost is run again and given the recorded turns.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from april.rollout.environment import Environment, EnvStep, Observation, ObservationError, Said, TokenIds, Turn
from april.rollout.episode_limits import EpisodeLimits
from april.rollout.episodes import Episodes
from april.rollout.trajectory import Prompt, Sample

log = logging.getLogger(__name__)

MOST_TURNS = 1 << 30
"""How many there may be is the loop's own setting."""
TRACED_AS: Mapping[str, Any] = {"step": -1, "sample_index": -1, "rollout_n": 0, "validate": False}


class AgentLoops:
    """The agent loops under way.

    Args:
        worker: verl's agent-loop worker, which has tools and tokenizer.
        rows: what verl's dataset says of each prompt under way, by its id.
        sampling_params: verl's, as every loop is given them. What loops ask for on top, the tokens that stop a turn, is
            put there.
    """

    def __init__(self, worker: Any, rows: Mapping[str, Mapping[str, Any]], sampling_params: dict[str, Any]) -> None:
        self._worker = worker
        self._rows = rows
        self.sampling_params = sampling_params
        self._given = dict(sampling_params)
        self._ended: dict[str, Playing] = {}
        """Of episodes that are over, by sample."""

    def episodes(self, context_length: int) -> Episodes:
        """As the scheduler plays them: without time limits, as verl; a loop that fails leaves its group out."""
        limits = EpisodeLimits(
            recovery="replay", on_error="reject", concurrency=MOST_TURNS, reset_timeout=None, step_timeout=None
        )

        def row(prompt: Prompt) -> dict[str, Any]:
            return dict(self._rows[prompt.id])

        def let_go(sample_id: str, environment: Environment) -> None:
            assert isinstance(environment, Playing)
            self._ended[sample_id] = environment

        return Episodes(lambda: Playing(self), NoText(), context_length, limits, row, let_go)

    async def output(self, prompt: Prompt, sample: Sample) -> AgentLoopOutput | None:
        """What the loop of a finished sample returned; None if it does not come to an end with it."""
        playing = self._ended.pop(sample.id, None)
        try:
            if playing is None:
                playing = await self._again(prompt, sample)
            output = await playing.end(sample.turn_ids(sample.turns))
        except Exception as error:  # what was sampled is trained on without what the loop would say of it
            log.warning("an agent loop failed at its end: %s: %s", type(error).__name__, error)
            return None
        same = output is not None and [*output.prompt_ids, *output.response_ids] == sample.response_ids
        return output if same else None

    async def _again(self, prompt: Prompt, sample: Sample) -> Playing:
        """A loop that a restart has lost after its last answer."""
        playing = Playing(self)
        await playing.reset(self._rows[prompt.id], 0)
        for index in range(sample.turns):
            await playing.step(Turn(sample.id, index, "", sample.turn_ids(index)))
        return playing

    def keep(self, sample_ids: Collection[str]) -> None:
        """No other samples than these will be asked for."""
        for id in [id for id in self._ended if id not in sample_ids]:
            self._ended.pop(id).stop()

    async def run(self, client: Playing, row: Mapping[str, Any]) -> AgentLoopOutput:
        """A run of the loop that a row names, as verl's worker makes it."""

        async def returned(output: Any, validate: bool, **_: Any) -> Any:
            return output

        worker = copy.copy(self._worker)
        worker.llm_client = client
        worker._agent_loop_postprocess = returned
        output = await worker._run_agent_loop(dict(self._given), TRACED_AS, trace=False, **row)
        if not isinstance(output, AgentLoopOutput):
            raise ObservationError(f"the agent loop returned a {type(output).__name__}: april takes one trajectory")
        return output

    def ask(self, sampling_params: Mapping[str, Any]) -> None:
        """Sample as a loop asks to, which must be as all others do.

        Raises:
            ObservationError: it is not.
        """
        asked = dict(sampling_params)
        stops = sorted(asked.pop("stop_token_ids", ()) or ())
        mine = self.sampling_params
        if asked != self._given or stops != sorted(mine.get("stop_token_ids", stops)):
            raise ObservationError(
                f"the agent loop asks for {dict(sampling_params)} where turns are sampled with {mine}: april samples "
                "all turns of a run alike; set it under actor_rollout_ref.rollout"
            )
        if stops:
            mine["stop_token_ids"] = stops


class NoText:
    """The bridge of episodes that know tokens only."""

    def begin(self, prompt: Prompt, observation: Observation) -> None:
        return None

    def read(self, token_ids: Sequence[int]) -> Said:
        return Said("")

    def extend(self, sample: Sample, observation: Observation) -> None:
        return None


class Playing:
    """An agent loop under way, which takes this for verl's LLM client."""

    def __init__(self, loops: AgentLoops) -> None:
        self._loops = loops
        self._run: asyncio.Task[AgentLoopOutput] | None = None
        self._asked: asyncio.Future[list[int]]
        self._answer: asyncio.Future[TokenOutput] | None = None
        self._token_ids: list[int] = []
        """Prompt and response so far."""
        self._mask: list[int] = []
        """Whether the policy sampled them."""
        self._prompt = 0
        """How many of them are the prompt."""

    async def reset(self, prompt: Mapping[str, Any], seed: int) -> TokenIds:
        """Begin; the whole prompt is what the loop asks to go on from."""
        loop = asyncio.get_running_loop()
        self._asked = loop.create_future()
        self._run = loop.create_task(self._loops.run(self, prompt), name="agent loop")
        new = await self._next()
        if new is None:
            raise ObservationError("the agent loop ended before it asked anything")
        self._prompt = len(new)
        return new

    async def step(self, turn: Turn) -> EnvStep:
        new = await self._told(turn.token_ids, "completed")
        if new is not None:
            return EnvStep(new)
        assert self._run is not None
        self._check(self._run.result())
        return EnvStep(done=True)

    async def end(self, token_ids: Sequence[int]) -> AgentLoopOutput | None:
        """What the loop returned, or returns to a last turn that ran out of its budget."""
        assert self._run is not None
        if not self._run.done() and token_ids:
            await self._told(token_ids, "length")
        if not self._run.done():
            self.stop()
            return None
        self._check(self._run.result())
        return self._run.result()

    def stop(self) -> None:
        if self._run is not None:
            self._run.cancel()

    async def close(self) -> None:
        """Its output is asked for yet."""

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """What a loop calls: it is answered with a turn."""
        if any(kwargs.get(f"{kind}_data") for kind in ("image", "video", "audio")):
            raise ObservationError("the agent loop's request has images, video or audio, which april does not")
        if self._asked.done():
            raise ObservationError("the agent loop asks for two turns at a time")
        self._loops.ask(sampling_params)
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.set_result(list(prompt_ids))
        return await self._answer

    async def _told(self, token_ids: Sequence[int], reason: str) -> TokenIds | None:
        """The new tokens of the request that follows a turn; None if the loop has ended."""
        self._token_ids += token_ids
        self._mask += [1] * len(token_ids)
        answer, self._answer = self._answer, None
        assert answer is not None, "the agent loop has asked nothing"
        self._asked = asyncio.get_running_loop().create_future()
        answer.set_result(TokenOutput(token_ids=list(token_ids), stop_reason=reason))
        return await self._next()

    async def _next(self) -> TokenIds | None:
        assert self._run is not None
        await asyncio.wait({self._run, self._asked}, return_when=asyncio.FIRST_COMPLETED)
        if self._run.done():
            self._run.result()
            return None
        asked, known = self._asked.result(), self._token_ids
        if asked[: len(known)] != known:
            same = next((i for i, (a, b) in enumerate(zip(asked, known, strict=False)) if a != b), len(asked))
            raise ObservationError(f"the agent loop's request changes token {same} of the {len(known)} before it")
        new = TokenIds(asked[len(known) :])
        self._token_ids += new
        self._mask += [0] * len(new)
        return new

    def _check(self, output: AgentLoopOutput) -> None:
        """Whether a loop returned what was sampled."""
        returned, mask, sampled = [*output.prompt_ids, *output.response_ids], output.response_mask, self._mask
        if returned != self._token_ids or len(output.prompt_ids) != self._prompt:
            raise ObservationError(
                f"the agent loop returned {len(returned)} tokens that are not the {len(sampled)} of its turns"
            )
        if any(own > drawn for own, drawn in zip(mask, sampled[self._prompt :], strict=True)):
            raise ObservationError("the agent loop's mask has tokens that no policy sampled")
