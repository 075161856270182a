"""slime's custom generate functions (`--custom-generate-function-path`) as episodes.

Invariants:
- slime's function runs once per sample, with arguments whose router is april's endpoint; the responses that it requests
  are interrupted and resumed without its knowledge;
- a token counts in the loss only if the policy drew it, with the log-probability of the drawing;
- a function that fails stops the run, as in slime; a sample that the function aborts leaves its group out.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from slime.rollout.sglang_rollout import GenerateState
from slime.utils import http_utils
from slime.utils.misc import load_function
from slime.utils.types import Sample as SlimeSample

from april.disk import as_json
from april.integrations.generating_code import CodeEpisode, GeneratingCode, LeftOutError, leading_text, stop_strings
from april.integrations.slime.router import HOST, RouterEndpoint
from april.integrations.slime.samples import DIVIDED, SAMPLES
from april.integrations.slime.trajectories import fill_logprobs
from april.rollout.user_code.user_code import end_tasks

NEUTRAL: Mapping[str, Any] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
    "n": 1,
    "ignore_eos": False,
    "regex": None,
    "json_schema": None,
    "ebnf": None,
    "stop_regex": None,
    "logit_bias": None,
}
"""Sampling parameters that april supports with this value only."""


class GenerateFunction:
    """slime's generate function, run for each sample of april's.

    Args:
        args: slime's arguments.
        tokenizer: slime's.
        stop_token_ids: tokens that end a response.
        context_length: tokens of prompt and responses together.
    """

    def __init__(self, args: Namespace, tokenizer: Any, stop_token_ids: Sequence[int], context_length: int) -> None:
        self._args = args
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._function = load_function(args.custom_generate_function_path)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._router = RouterEndpoint()
        self.code = GeneratingCode(self._run, stop_token_ids, context_length, tokenizer.decode)
        GenerateState(args)  # slime keeps the first arguments that it sees, which must not be a sample's
        # Paused requests hold connections: with slime's limit, its evaluation would find none.
        unlimited = httpx.Limits(max_connections=None)
        http_utils._http_client = httpx.AsyncClient(limits=unlimited, timeout=httpx.Timeout(None), trust_env=False)
        # Other nodes cannot reach this process's endpoint.
        http_utils._distributed_post_enabled = False

    async def _run(self, episode: CodeEpisode) -> Mapping[str, Any]:
        sample = SlimeSample.from_dict(copy.deepcopy(episode.row["slime"][episode.index]))
        sample.session_id = sample.session_id or f"{sample.index}"
        await self._router.start()

        async def generate(body: Mapping[str, Any]) -> dict[str, Any]:
            return await self._generate(episode, body)

        with self._router.session(generate) as (port, session):
            args = copy.copy(self._args)
            # The functions refuse slime's own partial rollouts, whose unfinished samples they would have to continue.
            args.partial_rollout = False
            args.sglang_router_ip, args.sglang_router_port = HOST, port
            parameters = inspect.signature(self._function).parameters
            more = {"evaluation": False} if "evaluation" in parameters else {}
            sampling = dict(GenerateState(args).sampling_params)
            running = asyncio.ensure_future(self._function(args, sample, sampling, **more))
            try:
                await asyncio.wait({running, session.failed}, return_when=asyncio.FIRST_COMPLETED)
                if session.failed.done():
                    raise session.failed.result()
                returned = await running
            finally:
                await end_tasks([running])
        several = isinstance(returned, list)
        samples = returned if several else [returned]
        for one in samples:
            one.status = SlimeSample.Status(one.status)  # some functions give its text
            if one.status == SlimeSample.Status.ABORTED:
                raise LeftOutError("the generate function aborted the sample")
            fill_logprobs(episode, one)
        kept = json.loads(as_json([one.to_dict() for one in samples]))
        return {SAMPLES: kept, DIVIDED: several}

    async def _generate(self, episode: CodeEpisode, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a `/generate` request of SGLang's."""
        sampling = dict(body.get("sampling_params") or {})
        self._check(body, sampling)
        text = body.get("text")
        asked = body["input_ids"] if text is None else episode.tokens_of_text(text, self._encode)
        turn = await episode.respond(asked, sampling.get("max_new_tokens"), stop_strings(sampling.get("stop")))
        ids = turn.response
        said = self._decode(ids, sampling)
        matched: Any = ids[-1] if turn.stop is None and ids[-1] in self._stop_token_ids else turn.stop
        if matched is None:
            finish: dict[str, Any] = {"type": "length", "length": len(ids)}
        else:
            finish = {"type": "stop", "matched": matched}
            if not sampling.get("no_stop_trim"):
                said = self._decode(ids[:-1], sampling) if isinstance(matched, int) else said.partition(matched)[0]
        if text is not None:
            hidden = self._special if sampling.get("skip_special_tokens", True) else ()
            shown, count = leading_text(ids, said, lambda part: self._decode(part, sampling), hidden)
            turn.text, turn.text_tokens = text + shown, len(asked) + count
        meta = {
            "id": f"april-{len(episode.turns)}",
            "finish_reason": finish,
            "prompt_tokens": len(asked),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": str(turn.versions[-1]),
            "output_token_logprobs": [[p, id, None] for p, id in zip(turn.logprobs, ids, strict=True)],
        }
        return {"text": said, "output_ids": ids, "meta_info": meta}

    def _check(self, body: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        """Check that a request has april's sampling settings.

        Raises:
            RuntimeError: it does not.
        """

        def refuse(name: str, value: Any, remedy: str) -> None:
            raise RuntimeError(f"the generate function requests {name} = {value}: {remedy}")

        args = self._args
        for name in ("stream", "image_data", "video_data", "audio_data", "lora_path", "return_routed_experts"):
            if body.get(name):
                refuse(name, body[name], "april does not support it")
        prompts = body.get("input_ids") if body.get("text") is None else [body["text"]]
        if not prompts or any(isinstance(part, list) for part in prompts):
            refuse("input_ids", prompts, "april takes one prompt a request")
        drawn = {"temperature": args.rollout_temperature, "top_p": args.rollout_top_p, "top_k": args.rollout_top_k}
        for name, value in {**NEUTRAL, **drawn}.items():
            if (given := sampling.get(name, value)) not in (value, None):
                refuse(name, given, f"april draws all responses alike, with {value}")
        if unknown := set(sampling.get("stop_token_ids") or ()) - self._stop_token_ids:
            refuse("stop_token_ids", sorted(unknown), "set --rollout-stop-token-ids")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _decode(self, ids: Sequence[int], sampling: Mapping[str, Any]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=sampling.get("skip_special_tokens", True))
        return text


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that `skip_special_tokens` leaves out of a text."""
    added = (id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])


def for_evaluation(args: Namespace) -> Namespace:
    """Return arguments for slime's own evaluation: generate functions refuse partial rollouts, which it has none of."""
    if args.custom_generate_function_path is None:
        return args
    args = copy.copy(args)
    args.partial_rollout = False
    return args
