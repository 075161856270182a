"""OpenRLHF's agent executors (`--train.agent_func_path`) as episodes.

Invariants:
- OpenRLHF's own function loads the executor, and the executor runs once per sample; the responses that it requests are
  interrupted and resumed without its knowledge;
- the actions of a trajectory are tokens that the policy drew, with the log-probabilities of the drawing;
- an executor that fails stops the run, as in OpenRLHF.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
from vllm import SamplingParams

from april.disk import as_json
from april.integrations.generating_code import CodeEpisode, GeneratingCode, stop_strings
from april.rollout.trajectory.prompt import Prompt

DRAWN_WITH = ("temperature", "top_p", "top_k")
"""Parameters that every response of a run is drawn with."""
REQUIRED = ("observation_tokens", "action_ranges", "rollout_log_probs")
"""Values that OpenRLHF reads of every executor's response."""
FIELDS = (*REQUIRED, "truncated", "reward", "scores", "extra_logs")
"""Values of an executor's response that are kept with the sample, where it has them."""


def request_output(ids: list[int], logprobs: Sequence[float], finish_reason: str, text: str = "") -> Any:
    """Return a response as OpenRLHF's executors read vLLM's."""
    by_token = [{id: SimpleNamespace(logprob=float(p))} for id, p in zip(ids, logprobs, strict=True)]
    output = SimpleNamespace(token_ids=ids, logprobs=by_token, finish_reason=finish_reason, text=text)
    return SimpleNamespace(outputs=[output])


class SampleEngine:
    """The vLLM engine, for the executor of one sample.

    Args:
        sampling: vLLM's parameters that every response is drawn with.
    """

    def __init__(self, episode: CodeEpisode, tokenizer: Any, sampling: Any) -> None:
        self._episode = episode
        self._tokenizer = tokenizer
        self._sampling = sampling
        self.closed = False

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Any:
        if self.closed:
            raise RuntimeError("the agent executor uses the llm_engine of a sample that has ended: use each call's own")
        if multi_modal_data:
            raise RuntimeError("the agent executor sends images: april's integration passes on no images")
        for name in DRAWN_WITH:
            wanted, given = getattr(self._sampling, name), getattr(sampling_params, name)
            if wanted != given:
                raise RuntimeError(
                    f"the agent executor requests {name} = {given}: april draws all responses of a run alike, with "
                    f"{wanted}; set it for the run"
                )
        stops = stop_strings(sampling_params.stop)
        turn = await self._episode.respond(prompt_token_ids, sampling_params.max_tokens, stops)
        ids = turn.response
        # vLLM leaves an end token, and by default a stop string, out of the text.
        shown = ids[:-1] if turn.end == "stop" and turn.stop is None else ids
        text = self._tokenizer.decode(shown, skip_special_tokens=sampling_params.skip_special_tokens)
        if turn.stop is not None:
            before, found, _ = text.partition(turn.stop)
            text = before + found if sampling_params.include_stop_str_in_output else before
        return request_output(ids, turn.logprobs, turn.end, text)


class AgentExecutor:
    """OpenRLHF's executor, run for each sample of april's.

    Args:
        path: of the Python file with the class `AgentExecutor`.
        tokenizer: OpenRLHF's.
        stop_token_ids: tokens that end a response.
        generate_kwargs: OpenRLHF's sampling settings.
        context_length: tokens of prompt and responses together.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
        generate_kwargs: Mapping[str, Any],
        context_length: int,
    ) -> None:
        self._executor = _load_agent_executor(path)
        self._tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self._max_length = generate_kwargs["max_len"]
        self.code = GeneratingCode(self._execute, stop_token_ids, context_length, tokenizer.decode)

    def prompt(self, prompt: str, label: Any, kwargs: Mapping[str, Any]) -> Prompt:
        """Return a prompt whose tokens the executor makes."""
        sampling = {name: kwargs[name] for name in (*DRAWN_WITH, "max_new_tokens") if kwargs.get(name) is not None}
        return Prompt((), metadata={"prompt": prompt, "label": label, "sampling": sampling})

    async def _execute(self, episode: CodeEpisode) -> Mapping[str, Any]:
        row = episode.row
        given = dict(row["sampling"])
        params = SamplingParams(
            max_tokens=given.pop("max_new_tokens", None), min_tokens=1, skip_special_tokens=False, logprobs=1, **given
        )
        engine = SampleEngine(episode, self._tokenizer, SamplingParams(**given))
        try:
            response = await self._executor.execute(
                prompt=row["prompt"],
                label=row["label"],
                sampling_params=params,
                max_length=self._max_length,
                hf_tokenizer=self._tokenizer,
                llm_engine=engine,
            )
        finally:
            engine.closed = True
        kept = kept_of(response)
        acts = [False] * len(response["observation_tokens"])
        for start, end in response["action_ranges"]:
            acts[start:end] = [True] * (end - start)
        episode.check(response["observation_tokens"], acts)
        return kept


def kept_of(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an executor's response that are kept with the sample.

    Raises:
        RuntimeError: the response lacks a value that OpenRLHF needs.
    """
    if missing := [name for name in REQUIRED if name not in response]:
        raise RuntimeError(f"the agent executor's response lacks {', '.join(missing)}, which OpenRLHF needs: return it")
    # Rewards and logs may be tensors: they are reduced to JSON types.
    kept: dict[str, Any] = json.loads(as_json({name: response[name] for name in FIELDS if name in response}))
    return kept
