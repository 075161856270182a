"""verl's agent loops as the programs of april's episodes.

Invariants:
- verl's own code creates and runs one loop per sample; responses are interrupted and resumed without the loop's
  knowledge;
- the mask of a trajectory may exclude sampled tokens, but never includes tokens that no policy sampled;
- log-probabilities and versions of a trajectory are april's; other fields of a loop's output are kept with the sample;
- a loop that was lost in a restart runs again and receives the recorded responses;
- a loop that fails, or requests what april does not support, leaves its group out.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from april.integrations.generating_code import CodeEpisode, GeneratingCode, LeftOutError, result_of
from april.integrations.stop_tokens import end_tokens
from april.integrations.verl.images import digest_of
from april.integrations.verl.prompt_encoder import PromptEncoder
from april.rollout.episodes.environment import ObservationError, saved
from april.rollout.episodes.turns import EpisodeOver, Stopping
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.segment import ENVIRONMENT

OUTPUTS = "outputs"
"""Key in the information of an episode's end: the trajectories that the loop returned."""
KEPT = ("prompt_ids", "response_ids", "response_mask", "reward_score", "num_turns")
"""Fields of a trajectory that are kept as they are."""
TRACE_INFO: Mapping[str, Any] = {"step": -1, "sample_index": -1, "rollout_n": 0, "validate": False}


class TurnClient:
    """Takes the place of verl's LLM client, for one agent loop."""

    def __init__(self, episode: CodeEpisode, loops: AgentLoops) -> None:
        self._episode = episode
        self._loops = loops
        self._prompt: int | None = None
        """Number of tokens of the first request's prompt."""

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Return the policy's response to a loop's request."""
        if any(kwargs.get(f"{kind}_data") for kind in ("video", "audio")):
            raise ObservationError("the agent loop's request has video or audio, which april does not support")
        await self._loops.check_images(self._episode.row["uid"], prompt_ids, kwargs)
        self._loops.adopt(sampling_params)
        if self._prompt is None:
            self._prompt = len(prompt_ids)
        turn = await self._episode.respond(prompt_ids, self._loops.tokens_left(len(prompt_ids) - self._prompt))
        reason = "completed" if turn.end == "stop" else "length"
        return TokenOutput(token_ids=turn.response, log_probs=turn.logprobs, stop_reason=reason)


class AgentLoops:
    """Runs verl's agent loops.

    Args:
        worker: verl's agent-loop worker, which holds the tools and the tokenizer.
        encoder: keeps the images of the prompts in flight.
        rows: the dataset rows of the prompts in flight, by prompt id, which is the `uid` in a prompt's metadata.
        sampling_params: verl's sampling parameters, which every loop receives. The stop tokens that the loops request
            are added to this dictionary.
        context_length: tokens of prompt and responses together.

    Attributes:
        code: the loops as april's programs.
    """

    def __init__(
        self,
        worker: Any,
        encoder: PromptEncoder,
        rows: Mapping[str, Mapping[str, Any]],
        sampling_params: dict[str, Any],
        context_length: int,
    ) -> None:
        self._worker = worker
        self._encoder = encoder
        self._rows = rows
        self.sampling_params = sampling_params
        self._base_params = dict(sampling_params)
        model = worker.model_config
        self._ends = list(end_tokens(worker.tokenizer, model.hf_config, model.generation_config))
        self.code = GeneratingCode(self._run, self._ends, context_length)

    async def _run(self, episode: CodeEpisode) -> Mapping[str, Any]:
        try:
            outputs = await self._outputs(episode)
            return {OUTPUTS: [kept_of(output, episode) for output in outputs]}
        except (EpisodeOver, Stopping):
            raise
        except Exception as error:
            raise LeftOutError(f"{type(error).__name__}: {error}") from error

    async def _outputs(self, episode: CodeEpisode) -> list[AgentLoopOutput]:
        """Run the agent loop that a row names, as verl's worker does."""

        # Replaces verl's post-processing, which writes trajectories: april does that when the group is handed over.
        async def returned(output: Any, validate: bool, **_: Any) -> Any:
            return output

        # A shallow copy per loop: tools and tokenizer are shared, client and post-processing belong to the loop.
        worker = copy.copy(self._worker)
        worker.llm_client = TurnClient(episode, self)
        worker._agent_loop_postprocess = returned
        row = self._rows[episode.row["uid"]]
        output = await worker._run_agent_loop(
            dict(self._base_params), TRACE_INFO, trace=False, session_id=episode.index, **row
        )
        outputs: list[AgentLoopOutput] = output if isinstance(output, list) else [output]
        if not outputs:
            raise ObservationError("the agent loop returned no trajectory")
        return outputs

    def tokens_left(self, answered: int) -> int:
        """Return the token budget of a response, after this many tokens since the first prompt. verl's replicas give
        every response at least one."""
        length: int = self._worker.rollout_config.response_length
        return max(1, min(length, length - answered))

    async def check_images(self, uid: str, token_ids: Sequence[int], request: Mapping[str, Any]) -> None:
        """Check that a request has the images that its tokens stand for; see `PromptEncoder`.

        Args:
            uid: of the prompt.
            token_ids: of the request.
            request: arguments of the request.

        Raises:
            ObservationError: it has others.
        """
        given = list(request.get("image_data") or ())
        places = self._encoder.places(token_ids)
        if not given and not places:
            return
        hashes = await asyncio.to_thread(lambda: tuple(map(digest_of, given)))
        if len(hashes) != places or hashes != self._encoder.hashes(uid)[:places]:
            raise ObservationError(
                f"the agent loop's request has {len(given)} images for {places} ranges of placeholders, and they must "
                "be the first images of its prompt: april keeps no images of tools, nor images that a loop has changed"
            )
        if (settings := request.get("mm_processor_kwargs") or {}) != self._encoder.settings:
            raise ObservationError(
                f"the agent loop's request has mm_processor_kwargs {settings} where data.mm_processor_kwargs is "
                f"{self._encoder.settings}: set it there"
            )

    def adopt(self, sampling_params: Mapping[str, Any]) -> None:
        """Adopt the stop tokens that a loop requests.

        Raises:
            ObservationError: its sampling parameters differ from the other loops'.
        """
        requested = dict(sampling_params)
        stops = sorted(requested.pop("stop_token_ids", ()) or ())
        mine = self.sampling_params
        # The first loop that names stop tokens decides them for all, because responses are sampled alike.
        if requested != self._base_params or stops != sorted(mine.get("stop_token_ids", stops)):
            raise ObservationError(
                f"the agent loop requests {dict(sampling_params)} where responses are sampled with {mine}: april "
                "samples all responses of a run alike; set it under actor_rollout_ref.rollout"
            )
        if stops:
            mine["stop_token_ids"] = stops
            self._ends += [id for id in stops if id not in self._ends]


def kept_of(output: AgentLoopOutput, episode: CodeEpisode) -> dict[str, Any]:
    """Return the values of a loop's trajectory that are kept with the sample.

    Raises:
        ObservationError: its mask has tokens that no policy sampled, or it has no other tokens.
    """
    token_ids, begin = [*output.prompt_ids, *output.response_ids], len(output.prompt_ids)
    drawn = episode.check(token_ids, [*[False] * begin, *map(bool, output.response_mask)])
    response = [drawn.get(index) for index in range(begin, len(token_ids))]
    if not any(response):
        raise ObservationError("the agent loop returned a response without a token that the policy sampled")
    return {
        **{name: getattr(output, name) for name in KEPT},
        "metrics": output.metrics.model_dump(),
        "extra_fields": saved(output.extra_fields, "the extra_fields of an agent loop"),
        "response_logprobs": [0.0 if token is None else token.logprob for token in response],
        "versions": [ENVIRONMENT if token is None else token.version for token in response],
    }


def outputs_of(sample: Sample) -> list[AgentLoopOutput]:
    """Return what the agent loop returned for an episode, given the sample that it ended with."""
    outputs = []
    for kept in result_of(sample)[OUTPUTS]:
        given = {**kept, "metrics": AgentLoopMetrics(**kept["metrics"])}
        fields = fields_of(given.pop("versions"), given.pop("extra_fields"))
        outputs.append(AgentLoopOutput(**given, extra_fields=fields))
    return outputs


def fields_of(versions: Sequence[int], of_loop: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return verl's additional fields of a trajectory.

    Args:
        versions: policy version of each response token, or `ENVIRONMENT`.
        of_loop: fields that an agent loop has set.
    """
    own = [version for version in versions if version != ENVIRONMENT]
    return {
        "turn_scores": [],
        "tool_rewards": [],
        **copy.deepcopy(of_loop or {}),
        "global_steps": own[-1],
        "min_global_steps": min(own),
        "max_global_steps": max(own),
        "policy_versions": list(versions),
    }
