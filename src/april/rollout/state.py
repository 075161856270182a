"""The state of the rollouts, which only events change.

Invariants:
- only `apply` changes the state (`absorb` is its fast path for sampled tokens): a live run applies and records events,
  and after a crash the recorded events are applied again;
- an event that breaks a rule changes nothing;
- a state that was saved and loaded continues with the same groups and the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from april.rollout.admission.admission import Admission
from april.rollout.admission.lengths import LengthModel
from april.rollout.buffer import Buffer
from april.rollout.engine import Chunk, ChunkError
from april.rollout.episodes.environment import TokenIds, fingerprint
from april.rollout.events import (
    Accepted,
    Admitted,
    Branched,
    Ended,
    Event,
    Rejected,
    Restarted,
    Rewarded,
    Stepped,
    Trained,
    Updated,
)
from april.rollout.params import RolloutParams
from april.rollout.request_interval import RequestInterval
from april.rollout.staleness import StalenessError, feasible
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.transition import Origin, Transition


class Absorbed(NamedTuple):
    """Result of absorbing a batch of chunks."""

    tokens: int
    """Number of tokens appended."""
    started: list[Sample]
    """Samples that received the first tokens of their requests."""
    ended: list[Sample]
    """Samples whose requests have ended."""
    failed: list[Chunk]
    """Chunks with an error."""
    complete: list[Group]
    """Groups that are complete now."""
    broken: list[ChunkError]
    """An error for each chunk that broke a rule."""


class RolloutState:
    """Buffered groups, rewards, counts, policy versions, and the models of lengths and engine.

    Args:
        params: how many groups are generated at once, and their largest staleness.
        lengths: the length model.
        admission: decides how many groups are in the buffer.
        filtered: a complete group is ready only once a filter has accepted it.
        scored: a complete group is ready only once it is rewarded, because a missing reward may turn it away.
        sample_type: class of the samples of new groups.
        evaluation: give the groups the names and seeds of an evaluation.
    """

    def __init__(
        self,
        params: RolloutParams,
        lengths: LengthModel,
        admission: Admission,
        filtered: bool,
        scored: bool,
        sample_type: type[Sample] = Sample,
        evaluation: bool = False,
    ) -> None:
        self.params = params
        self.lengths = lengths
        self.admission = admission
        self.filtered = filtered
        self.scored = scored
        self.sample_type = sample_type
        self.evaluation = evaluation
        self.engine_version = 0
        """Policy version of the engine's weights."""
        self.trainer_version = 0
        """Policy version that results from training on every batch so far: at least `engine_version`."""
        self.buffer = Buffer()
        self.ready: dict[int, Group] = {}
        """Complete groups that may be trained on: nothing can reject them any more."""
        self._tokens_at_last_step: dict[str, int] = {}
        """Policy tokens that each buffered sample had when the last batch was returned."""
        self._sampled_at_last_step: int | None = 0
        """Tokens that had been sampled by then; None if unknown."""
        self._removed_growth: list[RequestInterval] = []
        """Growth, since then, of samples whose groups were rejected."""
        self._ended_episodes: dict[str, int] = {}
        """Policy tokens of the episodes that their environments have ended since then."""

    def apply(self, event: Event) -> None:
        """Apply `event`.

        Raises:
            ChunkError: a chunk that breaks a rule of the engine protocol.
            LookupError, ValueError: the event does not follow from those before it.
        """
        match event:
            case Chunk():
                if broken := self.absorb((event,)).broken:
                    raise broken[0]
            case Admitted(id, prompt, n, sampling, seed):
                group = Group.start(id, prompt, n, sampling, seed, self.evaluation, self.sample_type)
                self.buffer.admit(group)
            case Stepped():
                self._step(event)
            case Branched(group_id, index, episode, parent, shared, token_ids, transition, features):
                origin = Origin(parent, shared)
                self.buffer.groups[group_id].branch(index, episode, origin, token_ids, transition, features)
            case Ended():
                self._end_episode(event)
            case Restarted(sample_id):
                self._restart(self.buffer.find(sample_id))
            case Rewarded(group_id, rewards):
                group = self.buffer.groups[group_id]
                group.reward(rewards)
                self._mark_ready(group)
            case Accepted(group_id):
                self.ready[group_id] = self.buffer.groups[group_id]
            case Rejected(group_id, reason):
                group = self.buffer.groups[group_id]
                self.ready.pop(group_id, None)
                self.buffer.reject(group, reason)
                self._removed_growth += self._growth(group.samples)
            case Trained():
                self._train(event)
            case Updated(version):
                if version != self.engine_version + 1:
                    raise ValueError(f"policy version {version} cannot follow {self.engine_version}")
                self.engine_version = version
                # An update that no batch preceded advances both versions.
                self.trainer_version = max(self.trainer_version, version)
                if self.params.redraft:
                    self._redraft()

    def absorb(self, chunks: Sequence[Chunk], among: Mapping[str, Sample] | None = None) -> Absorbed:
        """Append sampled tokens. A chunk that breaks a rule is left out, with the later chunks of the same sample.

        Args:
            among: the samples that may receive tokens, by id; every buffered sample if None.
        """
        find = self.buffer.find if among is None else among.__getitem__
        tokens, current, groups = 0, self.engine_version, self.buffer.groups
        rejected: set[str] = set()
        started: list[Sample] = []
        ended: list[Sample] = []
        failed: list[Chunk] = []
        complete: list[Group] = []
        broken: list[ChunkError] = []
        for chunk in chunks:
            id, token_ids, logprobs, version, finish, error, _, routes = chunk
            try:
                if rejected and id in rejected:
                    raise KeyError(id)
                sample = find(id)
                # A chunk without tokens ends a request; its version describes no token.
                if version != current and len(token_ids) and not self._late(version, groups[sample.group_id]):
                    raise ValueError(f"the engine's policy version is {current}")
                if routes is not None:
                    sample.check_routes(routes, len(token_ids))
                tokens += (count := sample.extend(token_ids, logprobs, version, finish))
                if routes is not None:
                    sample.route(routes, version, self.params.latest_routes, self.params.fill_routes)
            except (KeyError, ValueError, TypeError) as reason:
                rule = "no such sample is in flight" if isinstance(reason, KeyError) else str(reason)
                broken.append(ChunkError(chunk, rule))
                rejected.add(id)
                continue
            if count and (request := sample.request) is not None and not request.first_tokens:
                request.first_tokens = count
                started.append(sample)
            if finish is not None:
                ended.append(sample)
                group = groups[sample.group_id]
                if group.complete:
                    complete.append(group)
            elif error is not None:
                failed.append(chunk)
        self.buffer.sampled_tokens += tokens
        for group in complete:
            self._mark_ready(group)
        return Absorbed(tokens, started, ended, failed, complete, broken)

    def _late(self, version: int, group: Group) -> bool:
        """Whether tokens of an earlier version are allowed: a server may freeze a request during an update. They must
        not make their group older than it was when the bound was checked."""
        first = group.first_version
        return first is not None and first <= version < self.engine_version

    def _step(self, event: Stepped) -> None:
        sample = self.buffer.find(event.sample_id)
        if event.turn != len(sample.transitions) - 1:
            raise ValueError(f"turn {event.turn} was answered where turn {len(sample.transitions) - 1} is due")
        # The answer to another turn would make a trajectory that never happened, in a replay as well.
        if event.action != (taken := fingerprint(TokenIds(sample.turn_ids(event.turn)) if sample.transitions else "")):
            raise ValueError(f"the answer belongs to turn {event.action}, but the policy's turn is {taken}")
        sample.observe(event.token_ids, event.transition, event.finish, event.state, event.features)
        self.buffer.environment_tokens += len(event.token_ids)
        if sample.finish is not None:
            self._ended_episodes[sample.id] = sample.policy_tokens
        self._mark_ready(self.buffer.group_of(sample))

    def _end_episode(self, event: Ended) -> None:
        group = self.buffer.groups[event.group_id]
        samples = group.episode(event.episode)
        if not all(sample.awaits_environment and sample.origin for sample in samples):
            raise ValueError(f"episode {event.episode} of group {group.id} ended while the policy had the turn")
        if event.last not in [sample.index for sample in samples]:
            raise ValueError(f"episode {event.episode} of group {group.id} has no sample {event.last}")
        for sample in samples:
            last = sample.index == event.last
            end = replace(event.transition, start=sample.length) if last else Transition(sample.length, 0)
            sample.observe((), end, sample.finish_of(event.finish))
            self._ended_episodes[sample.id] = sample.policy_tokens
        kept = {event.episode, event.last}
        group.drop([sample for sample in samples if not sample.policy_tokens and sample.index not in kept])
        self._mark_ready(group)

    def _restart(self, sample: Sample) -> None:
        if sample.finish is not None:
            raise ValueError(f"the sample has finished ({sample.finish}) and cannot restart")
        group = self.buffer.group_of(sample)
        samples = group.episode(sample.episode)
        # Before the tokens are dropped: the length model learns from them as from an interrupted request.
        self._removed_growth += self._growth(samples)
        for one in samples:
            self._tokens_at_last_step.pop(one.id, None)
        tokens = sum(one.policy_tokens for one in samples)
        self.buffer.restarted.add(1, tokens, sum(one.environment_tokens for one in samples))
        group.restart(sample.episode)

    def _redraft(self) -> None:
        self._removed_growth += self._growth(self.buffer.samples)
        self._tokens_at_last_step, self._ended_episodes = {}, {}
        self.buffer.redraft()
        self.ready = {}

    def _mark_ready(self, group: Group) -> None:
        """Make a group ready as soon as nothing can turn it away."""
        if not self.filtered and group.complete and (group.rewarded or not self.scored):
            self.ready.setdefault(group.id, group)

    def _train(self, event: Trained) -> None:
        step = event.step
        # `RolloutLoop.next_train_version` is the engine's version without overlap, and the trainer's with overlap.
        if step.version not in (self.engine_version, self.trainer_version):
            raise ValueError(f"a step of policy version {step.version} cannot be taken at {self.trainer_version}")
        # A batch that is replayed from the journal comes without its groups.
        step.groups = [self.buffer.groups[id] for id in event.group_ids]
        self.buffer.train(step.groups)
        self.trainer_version = step.version + 1
        for group in step.groups:
            self.ready.pop(group.id, None)
        self._tokens_at_last_step = {
            sample.id: sample.length - sample.environment_tokens
            for sample in self.buffer.samples
            if sample.length > sample.environment_tokens
        }
        self._removed_growth = []
        self._sampled_at_last_step = self.buffer.sampled_tokens
        step.buffered_tokens = sum(self._tokens_at_last_step.values())
        self.buffer.check(step.buffered_tokens)
        # Before `observe`: admission plans with the lengths of this step.
        self._learn(step.request_intervals, step.groups)
        self._ended_episodes = {}
        self.admission.observe(step)

    def _learn(self, spans: Sequence[RequestInterval], groups: Sequence[Group]) -> None:
        """Learn lengths from the request intervals. An episode is ended by its environment, after its last interval: in
        the same step or a later one."""
        before = [span.before for span in spans]
        after = [span.after for span in spans]
        finished = [span.outcome == "finished" for span in spans]
        last = {span.sample_id: place for place, span in enumerate(spans)} if self._ended_episodes else {}
        for id, length in self._ended_episodes.items():
            if id in last:
                finished[last[id]] = True
            else:
                before.append(length)
                after.append(length)
                finished.append(True)
        self.lengths.observe(before, after, finished)
        self.lengths.observe_groups([[s.length - s.environment_tokens for s in group.outcomes] for group in groups])

    def _growth(self, samples: Iterable[Sample]) -> list[RequestInterval]:
        before = self._tokens_at_last_step
        return [
            RequestInterval(
                sample.id,
                sample.group_id,
                0.0,
                before.get(sample.id, 0),
                after=sample.policy_tokens,
                outcome="interrupted" if sample.finish is None else "finished",
            )
            for sample in samples
            if sample.policy_tokens > before.get(sample.id, 0)
        ]

    @property
    def grown(self) -> list[RequestInterval]:
        """Tokens sampled since the last batch was returned, as intervals without times, one per sample: the result of
        attempts at the next batch that were cut short."""
        # The usual case at the start of a step, which avoids a pass over all samples.
        if self.buffer.sampled_tokens == self._sampled_at_last_step:
            return []
        return [*self._removed_growth, *self._growth(self.buffer.samples)]

    def check_bound(self, version: int, otherwise: str) -> None:
        """Check that every buffered group can be trained on within the bound, if policy `version` is trained next.

        Raises:
            StalenessError: some cannot; the message begins with `otherwise`.
        """
        size, bound = self.params.rollout_batch_size, self.params.max_staleness
        first_versions = [first for group in self.buffer if (first := group.first_version) is not None]
        if bound is not None and not feasible(first_versions, version, size, bound):
            raise StalenessError(f"{otherwise} within max_staleness = {bound} at rollout_batch_size = {size}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types and `Routes`, which `state_files` writes."""
        return {
            "engine_version": self.engine_version,
            "trainer_version": self.trainer_version,
            "buffer": self.buffer.state_dict(),
            "ready": list(self.ready),
            "before": dict(self._tokens_at_last_step),
            "left": [asdict(span) for span in self._removed_growth],
            "ended": dict(self._ended_episodes),
            "lengths": self.lengths.state_dict(),
            "admission": self.admission.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`.

        Raises:
            StalenessError: not all groups can be trained on within this bound.
        """
        self.restore(state)
        self.check_bound(self.trainer_version, "the saved groups cannot all be trained on")

    def restore(self, state: Mapping[str, Any]) -> None:
        """`load_state_dict` without a check of the staleness bound."""
        self.engine_version = state["engine_version"]
        self.trainer_version = state["trainer_version"]
        self.buffer = Buffer.from_state_dict(state["buffer"])
        self.ready = {id: self.buffer.groups[id] for id in state["ready"]}
        self._tokens_at_last_step = dict(state["before"])
        self._removed_growth = [RequestInterval(**span) for span in state["left"]]
        self._sampled_at_last_step = None
        self._ended_episodes = dict(state.get("ended", {}))
        self.lengths.load_state_dict(state["lengths"])
        self.admission.load_state_dict(state["admission"])
