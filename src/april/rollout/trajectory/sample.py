"""A sample: one response, token by token.

Invariants:
- nothing here, and no decision of the scheduler, looks at text: tokens go in and tokens come out. Stop strings are
  found before, where an engine's tokens arrive (`stopping_engine.py`);
- every policy token keeps its behaviour log-probability and its policy version across any number of interruptions;
- only the last segment of an unfinished sample grows; a finished sample never changes;
- the response budget, the seed and the finish reason belong to the sample, not to a request, so a resumed sample
  spends nothing twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from april.rollout.request_interval import RequestInterval
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.features import Feature, check_features, features_to_json, moved
from april.rollout.trajectory.routes import RouteRows, Routes
from april.rollout.trajectory.segment import ENVIRONMENT, Segment
from april.rollout.trajectory.tokens import checked_tokens, is_plain
from april.rollout.trajectory.transition import Origin, Transition


@dataclass(slots=True)
class Sample:
    """One response, finished or not: a prompt and the segments that follow it. An episode is one sample or, where a
    program drives it, one or more.

    The budget counts the tokens that policies sampled; with `SamplingParams.observations_count` it also counts the
    answers of an environment.
    """

    group_id: int
    index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    segments: list[Segment] = field(default_factory=list)
    finish: FinishReason | None = None
    reward: float | None = None
    length: int = 0
    """Response tokens so far; stored because it is read at every chunk."""
    environment_tokens: int = 0
    """Response tokens that an environment inserted."""
    reward_info: Mapping[str, Any] = field(default_factory=dict)
    """Additional data of the reward (`Reward.info`)."""
    id: str = ""
    transitions: tuple[Transition, ...] = ()
    """In an episode: the answer to the reset, and one for each answered turn."""
    turn_ended: bool = False
    """The policy has ended a turn that the environment has not answered."""
    attempt: int = 0
    """Number of times that the episode was restarted."""
    state: Any = None
    """Latest saved state of the environment, if it can save itself."""
    draft: Sequence[int] = ()
    """Response sampled under older weights, for an engine to verify."""
    episode: int = -1
    """Index of the episode in its group: the sample's index, unless a program has branched off."""
    origin: Origin | None = None
    """Beginning of the prompt, once a program has asked for it."""
    turn_limit: int | None = None
    """Policy tokens at which the present turn ends, if the program has set a limit."""
    cut: Literal["turn", "budget", "context"] | None = None
    """Limit that has cut the turn, where a program drives the episode: the turn's own, or one of the sample."""
    routes: Routes | None = None
    """Experts of prompt and response tokens, with router replay."""
    filled_routes: int = 0
    """Rows of `routes` that were lost, and that a later version than their own has filled in."""
    features: tuple[Feature, ...] = ()
    """Images of prompt and response; see `features`."""
    request: RequestInterval | None = field(default=None, repr=False, compare=False)
    """The request in the engine while the sample is in flight; no part of a saved sample."""

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.group_id}.{self.index}"
        if self.episode < 0:
            self.episode = self.index

    @property
    def policy_tokens(self) -> int:
        """Response tokens that policies sampled."""
        return self.length - self.environment_tokens

    @property
    def budget_left(self) -> int:
        """Tokens that the policy may still sample, in this turn if the turn has a limit."""
        if self.turn_limit is None:
            return self.whole_budget_left
        return min(self.whole_budget_left, self.turn_limit - self.policy_tokens)

    @property
    def whole_budget_left(self) -> int:
        """Tokens that the policy may still sample, over all turns."""
        if self.sampling.observations_count and self.transitions:
            return self.sampling.max_tokens - self.length + self.transitions[0].tokens
        return self.sampling.max_tokens - self.policy_tokens

    def room(self, context_length: int) -> int:
        """Tokens that the policy may still sample if prompt and response together have at most `context_length`
        tokens."""
        return min(self.budget_left, context_length - len(self.prompt_ids) - self.length)

    @property
    def _turn_request(self) -> Mapping[str, Any]:
        """The program's request for the present turn; empty if there is none."""
        return (self.transitions[-1].request or {}) if self.transitions else {}

    @property
    def stop_strings(self) -> Sequence[str]:
        """Texts that end the response or the present turn: the recipe's, and those of the program's request."""
        requested = self._turn_request.get("stop", ())
        return (*self.sampling.stop, *requested) if requested else self.sampling.stop

    @property
    def turn_sampling(self) -> SamplingParams:
        """Sampling parameters of the present turn: the recipe's, with the temperature of the program's request."""
        temperature = self._turn_request.get("temperature")
        return self.sampling if temperature is None else replace(self.sampling, temperature=temperature)

    @property
    def scored_at(self) -> float:
        """Temperature that tokens were scored at where no request names one. Engines record the log-probabilities of
        greedy tokens at temperature 1."""
        return float(self.sampling.temperature or 1.0)

    @property
    def temperatures(self) -> NDArray[np.float32] | None:
        """Temperature that each response token was scored at, [length]; None if no request names one."""
        requests = [transition.request or {} for transition in self.transitions]
        if not any("temperature" in request for request in requests):
            return None
        temperatures = np.full(self.length, self.scored_at, np.float32)
        for turn, request in enumerate(requests):
            start, end = self.turn_span(turn)
            temperatures[start:end] = request.get("temperature", self.sampling.temperature) or 1.0
        return temperatures

    @property
    def first_version(self) -> int | None:
        """The policy version of the first sampled token; None while no token was sampled."""
        for segment in self.segments:
            if segment.version != ENVIRONMENT and segment.token_ids:
                return segment.version
        return None

    def extend(
        self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, finish: FinishReason | None = None
    ) -> int:
        """Append tokens that policy `version` sampled, end the sample if `finish` is given, and return their number.

        Raises:
            ValueError: names the broken rule; nothing was appended.
        """
        if self.finish is not None:
            raise ValueError(f"the sample has finished ({self.finish}) and cannot take more tokens")
        if self.turn_ended:
            raise ValueError("the turn has ended, and the environment has not answered it")
        count, packed = len(token_ids), isinstance(token_ids, array)
        if count != len(logprobs):
            raise ValueError(f"{count} tokens came with {len(logprobs)} log-probabilities")
        if not (count == 1 and is_plain(token_ids[0], logprobs[0])):
            token_ids, logprobs = checked_tokens(token_ids, logprobs)
        # The first comparison is a cheap bound: `budget_left` is never smaller, and this runs for every chunk.
        if count > self.sampling.max_tokens - self.length and count > self.budget_left:
            raise ValueError(f"{count} tokens came where the response budget leaves {self.budget_left}")
        if count:
            segments = self.segments
            if segments and (last := segments[-1]).version == version:
                last.token_ids.extend(token_ids)  # not by `Segment.extend`: the call would double the cost
                last.logprobs.extend(logprobs)
            else:
                if version < 0 or (segments and self._latest > version):
                    raise ValueError(f"policy versions never go back, but {version} came")
                segments.append(Segment.of(version, token_ids, logprobs, packed))
            self.length += count
        if finish is not None:
            self.end(finish)
        return count

    def check_routes(self, rows: RouteRows, count: int) -> None:
        """Check routes that come with `count` tokens.

        Raises:
            ValueError: they are of another model than earlier ones, or of tokens that were not consumed.
        """
        if self.routes is not None:
            self.routes.check(rows)
        consumed = len(self.prompt_ids) + self.length + count - 1
        if not 0 <= rows.start <= rows.end <= consumed:
            raise ValueError(f"routes of tokens {rows.start} to {rows.end} came, of which {consumed} were consumed")

    def route(self, rows: RouteRows, version: int, latest: bool, fill: bool = False) -> None:
        """Take routes that policy `version` computed, after the tokens that came with them.

        Args:
            latest: replace earlier routes. Otherwise a row is taken once, from the version that drew the next token;
                rows in front of tokens that no policy drew are taken from any version.
            fill: take unknown rows from any version, and count those of other versions than their own.
        """
        if self.routes is None:
            self.routes = Routes.like(rows)
        routes, last = self.routes, self.segments[-1] if self.segments else None
        end = len(self.prompt_ids) + self.length
        # The usual case, without an array of the versions of all tokens: these rows drew the last segment's tokens.
        drew = last is not None and last.version == version and rows.start + 1 >= end - len(last)
        if latest or (drew and rows.start >= routes.length):
            routes.put(rows)
        else:
            drawn_by = np.concatenate((np.full(len(self.prompt_ids), ENVIRONMENT), self.versions))
            drawn_by = drawn_by[rows.start + 1 : rows.end + 1]
            accepted = (drawn_by == version) | (drawn_by == ENVIRONMENT)
            known = routes.known[rows.start : rows.end]
            if fill:
                self.filled_routes += int((~accepted).sum() - (~accepted[: len(known)] & known).sum())
                accepted[:] = True
            accepted[: len(known)] &= ~known
            routes.put(rows, accepted)
        if self.finish is not None:
            routes.trim()

    @property
    def missing_routes(self) -> int:
        """Tokens that were consumed and whose own routes are unknown; another version may have filled them in."""
        known = 0 if self.routes is None else int(self.routes.known.sum())
        return len(self.prompt_ids) + self.length - 1 - known + self.filled_routes

    @property
    def _latest(self) -> int:
        """The policy version of the last sampled token; ENVIRONMENT while none was."""
        last = self.segments[-1].version
        return max([segment.version for segment in self.segments]) if last == ENVIRONMENT else last

    def end(self, finish: FinishReason) -> None:
        """End the sample, or the turn of an episode, for a reason that an engine has given."""
        if self.origin is not None:
            self.turn_ended = True  # what a limit means for the episode is up to the program
            if finish is not FinishReason.STOP:
                self.cut = "turn" if self.budget_left <= 0 else "context"
                self.cut = "budget" if self.whole_budget_left <= 0 else self.cut
        elif self.sampling.max_turns and finish is FinishReason.STOP:
            self.turn_ended = True
        # Engines report LENGTH for both limits; with budget left, the context was the limit.
        elif self.sampling.max_turns and finish is FinishReason.LENGTH and self.budget_left > 0:
            self.finish = FinishReason.CONTEXT
        else:
            self.finish = finish

    def observe(
        self,
        token_ids: Sequence[int],
        transition: Transition,
        finish: FinishReason | None = None,
        state: Any = None,
        features: Sequence[Feature] = (),
    ) -> None:
        """Append the answer of an environment, and finish the sample if `finish` is given.

        Args:
            features: images of the answer.

        Raises:
            ValueError: names the broken rule; nothing was appended.
        """
        if self.finish is not None:
            raise ValueError(f"the sample has finished ({self.finish}) and cannot take more tokens")
        if not self.awaits_environment:
            raise ValueError("an environment answered a turn that has not ended")
        if (transition.start, transition.tokens) != (self.length, len(token_ids)):
            raise ValueError(
                f"an answer of {len(token_ids)} tokens at {self.length} does not fit its transition, {transition}"
            )
        if features:
            check_features(token_ids, moved(features, -len(self.prompt_ids) - self.length))
            self.features = (*self.features, *features)
        self.transitions = (*self.transitions, transition)
        self.turn_ended, self.state = False, state
        self._limit_turn()
        if token_ids:
            if not self.segments or self.segments[-1].version != ENVIRONMENT:
                self.segments.append(Segment(ENVIRONMENT))
            self.segments[-1].extend(token_ids, [0.0] * len(token_ids))
            self.length += len(token_ids)
            self.environment_tokens += len(token_ids)
        self.finish = finish

    def finish_of(self, episode_end: FinishReason) -> FinishReason:
        """Return the finish reason of this sequence, given the episode's finish reason."""
        limits = {"budget": FinishReason.LENGTH, "context": FinishReason.CONTEXT}
        return limits.get(self.cut or "", episode_end) if episode_end is FinishReason.DONE else episode_end

    def begin(
        self,
        origin: Origin,
        prompt_ids: tuple[int, ...],
        transition: Transition,
        features: tuple[Feature, ...] = (),
    ) -> None:
        """Set the prompt that a program has asked for, with its images.

        Raises:
            ValueError: the sample has begun already, or the images do not fit the prompt.
        """
        if self.transitions or self.finish is not None:
            raise ValueError("the sample has begun already")
        check_features(prompt_ids, features)
        self.origin, self.prompt_ids, self.transitions, self.features = origin, prompt_ids, (transition,), features
        self._limit_turn()

    def _limit_turn(self) -> None:
        limit = self._turn_request.get("max_tokens")
        self.cut, self.turn_limit = None, None if limit is None else self.policy_tokens + limit

    def restore_origin(self, saved: Sequence[Any] | None) -> None:
        """Restore the program's requests from a result of `to_dict`."""
        if saved is not None:
            self.origin = Origin(saved[0], saved[1])
            last = self.transitions[-1]
            limit = self._turn_request.get("max_tokens")
            drawn = self.length - last.start - last.tokens
            self.turn_limit = None if limit is None else self.policy_tokens - drawn + limit

    def restart(self) -> None:
        """Drop everything after the prompt, because the environment cannot be restored."""
        self.origin = self.turn_limit = self.cut = self.routes = None
        self.segments, self.transitions = [], ()
        self.length = self.environment_tokens = self.filled_routes = 0
        self.turn_ended, self.state, self.reward, self.reward_info = False, None, None, {}
        self.attempt += 1

    @property
    def follows_draft(self) -> bool:
        """Whether there is a draft, and the response is a prefix of it."""
        return bool(self.draft) and self.kept_of_draft == self.length

    @property
    def kept_of_draft(self) -> int:
        """Length of the common prefix of draft and response."""
        both = zip(self.draft, self.response_ids, strict=False)
        return next((i for i, (old, new) in enumerate(both) if old != new), min(len(self.draft), self.length))

    def redraft(self) -> None:
        """Turn the response into a draft for newer weights. If the present draft was not verified to its end, its rest
        is kept."""
        if not self.follows_draft:
            self.draft = self.response_ids
        self.segments, self.finish, self.reward, self.reward_info = [], None, None, {}
        self.length, self.routes, self.filled_routes = 0, None, 0

    @property
    def truncated(self) -> bool:
        """Whether a budget ended the sample."""
        return self.finish is not None and self.finish.truncated

    @property
    def awaits_environment(self) -> bool:
        """Whether the environment acts next: it answers a turn, or starts the episode."""
        return self.finish is None and (self.turn_ended or not self.transitions) and self.sampling.max_turns > 0

    @property
    def turns(self) -> int:
        """Turns that an environment has answered."""
        return max(len(self.transitions) - 1, 0)

    def turn_ids(self, index: int) -> tuple[int, ...]:
        """Return the tokens of the policy's turn `index`; of an unfinished turn, the tokens so far."""
        return tuple(self.tokens_between(*self.turn_span(index)))

    def turn_span(self, index: int) -> tuple[int, int]:
        """Return the positions in the response at which the policy's turn `index` begins and ends."""
        before = self.transitions[index]
        end = self.transitions[index + 1].start if index + 1 < len(self.transitions) else self.length
        return before.start + before.tokens, end

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Return the response's tokens from `start` to before `end`."""
        parts = [segment.token_ids[low:high] for segment, low, high in self._between(start, end)]
        return [token for part in reversed(parts) for token in part]

    def logprobs_between(self, start: int, end: int) -> list[float]:
        """Return their log-probabilities, in nats."""
        parts = [segment.logprobs[low:high] for segment, low, high in self._between(start, end)]
        return [logprob for part in reversed(parts) for logprob in part]

    def versions_between(self, start: int, end: int) -> list[int]:
        """Return their policy versions."""
        spans = self._between(start, end)
        parts = [[segment.version] * (min(high, len(segment)) - low) for segment, low, high in spans]
        return [version for part in reversed(parts) for version in part]

    def _between(self, start: int, end: int) -> Iterator[tuple[Segment, int, int]]:
        """Yield the segments with tokens from `start` to before `end`, and the bounds in them, from the last one: most
        callers need the last turn, and a long episode has many segments."""
        at = self.length
        for segment in reversed(self.segments):
            if at <= start:
                return
            at -= len(segment)
            if at < end:
                yield segment, max(start - at, 0), end - at

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the prompt, in order."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Behaviour log-probability of each response token, shape [length]; 0 for environment tokens."""
        return np.array([p for segment in self.segments for p in segment.logprobs], dtype=np.float32)

    @property
    def versions(self) -> NDArray[np.int64]:
        """Policy version of each response token, shape [length]; ENVIRONMENT where no policy sampled it."""
        return np.repeat(np.array([s.version for s in self.segments], dtype=np.int64), [len(s) for s in self.segments])

    @property
    def prompt_features(self) -> tuple[Feature, ...]:
        """Images of the prompt, without those of later messages."""
        return self.features_between(0, len(self.prompt_ids))

    def features_between(self, start: int, end: int) -> tuple[Feature, ...]:
        """Return the images whose placeholders are among the tokens of prompt and response from `start` to before
        `end`."""
        return tuple(feature for feature in self.features if start <= feature.offset and feature.end <= end)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """True for tokens a policy sampled, shape [length]."""
        return np.not_equal(self.versions, ENVIRONMENT)

    def with_outlined_routes(self) -> Sample:
        """Return the sample for a process that reads only the length of its routes: without their content."""
        return self if self.routes is None else replace(self, routes=self.routes.outline())

    def to_dict(self) -> dict[str, Any]:
        """Return the sample, without its prompt and sampling settings, as JSON types and `Routes` (`state_files`)."""
        return {
            "index": self.index,
            "seed": self.seed,
            "finish": self.finish,
            "reward": self.reward,
            "reward_info": dict(self.reward_info),
            "segments": [[s.version, list(s.token_ids), list(s.logprobs)] for s in self.segments],
            **(self._episode() if self.sampling.max_turns else {}),
            **({"draft": list(self.draft)} if self.draft else {}),
            **({} if self.routes is None else {"routes": self.routes.frozen()}),
            **({"filled_routes": self.filled_routes} if self.filled_routes else {}),
        }

    def _episode(self) -> dict[str, Any]:
        return {
            "transitions": [asdict(transition) for transition in self.transitions],
            "turn_ended": self.turn_ended,
            "attempt": self.attempt,
            "state": self.state,
            **({} if self.origin is None else self._program()),
            **({"features": features_to_json(own)} if (own := self._own_features) else {}),
        }

    @property
    def _own_features(self) -> tuple[Feature, ...]:
        """Images that neither the group's prompt nor the sequence with the shared beginning has."""
        first = len(self.prompt_ids) if self.origin is None else self.origin.shared
        return tuple(feature for feature in self.features if feature.offset >= first)

    def _program(self) -> dict[str, Any]:
        assert self.origin is not None
        parent, shared = self.origin.parent, self.origin.shared
        return {"episode": self.episode, "origin": [parent, shared, list(self.prompt_ids[shared:])], "cut": self.cut}
