"""Rewards and the dynamic filter: which complete groups may be trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from april.rollout.batch import Failure
from april.rollout.buffer import Rejection
from april.rollout.events import Accepted, Rewarded
from april.rollout.generation.quarantine import Quarantined
from april.rollout.history import History
from april.rollout.params import FaultSettings
from april.rollout.rewards import RewardError, RewardTasks, Verdict, described
from april.rollout.step_stats import StepStats
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample
from april.rollout.user_code.user_code import UserCode


class Scoring:
    """Scores finished samples, and filters complete groups.

    Args:
        rewards: computes the rewards; None leaves samples unscored.
        history: applies and records the events.
        stats: statistics of the batch that is being collected.
        quarantined: groups that are left out.
        faults: treatment of rewards that fail.
        dynamic_filter: called with each complete, rewarded group; False rejects it.
        reject: rejects a group.
    """

    def __init__(
        self,
        rewards: RewardTasks | None,
        history: History,
        stats: StepStats,
        quarantined: Quarantined,
        faults: FaultSettings,
        dynamic_filter: Callable[[Group], bool] | None,
        reject: Callable[[Group, Rejection], None],
    ) -> None:
        self.rewards = rewards
        self.history = history
        self.state = history.state
        self.stats = stats
        self.quarantined = quarantined
        self.faults = faults
        self.dynamic_filter = dynamic_filter
        self._reject = reject

    def __len__(self) -> int:
        """Reward computations that are queued or running."""
        return 0 if self.rewards is None else len(self.rewards)

    def start_step(self) -> None:
        """Score finished samples without a reward, and filter groups that have never been filtered."""
        if self.rewards is None:
            return
        self.rewards.missing(self.state.buffer)
        for group in list(self.state.buffer):
            if failure := self._filter(group):
                raise RewardError.of(failure)

    def on_finished(self, finished: Sequence[Sample], complete: Sequence[Group]) -> None:
        """Start the rewards of samples that have finished, or of the groups that are complete with them."""
        if self.rewards is None:
            return
        if self.rewards.scope == "group":
            finished = [group.outcomes[-1] for group in complete]
        for sample in finished:
            if sample.group_id not in self.quarantined:
                self.rewards.finished(self.state.buffer.group_of(sample), sample)

    async def wait(self) -> None:
        """Wait until a reward function has returned or failed."""
        assert self.rewards is not None, "no rewards are computed"
        await self.rewards.wait()

    def forget(self, group: Group) -> None:
        """Cancel the reward computations of a group."""
        if self.rewards is not None:
            self.rewards.forget(group)

    def take_verdicts(self) -> RewardError | None:
        """Apply the rewards that were computed since the last call; return the error that ends the step, if any."""
        verdicts = [] if self.rewards is None else self.rewards.take()
        # All are applied before an error is returned: `take` hands out each verdict once.
        failures = [self._apply(verdict) for verdict in verdicts]
        for verdict in verdicts:
            if verdict.hopeless:
                return RewardError(f"no reward can be computed any more: {verdict.error}")
        return next((RewardError.of(failure) for failure in failures if failure is not None), None)

    def _apply(self, verdict: Verdict) -> Failure | None:
        """Apply one verdict; return the failure if it ends the step."""
        group, samples, rewards = verdict.group, verdict.samples, verdict.rewards
        # The group was rejected before this verdict was taken.
        if group.id not in self.state.buffer.groups:
            return None
        if verdict.error is not None:
            failure = Failure(verdict.failure, samples[0].id, group.prompt.id, verdict.error)
            self.stats.add_failure(failure)
            if self.faults.on_reward_error == "raise":
                return failure
            if self.faults.on_reward_error == "reject":
                self.quarantined.add(group, Rejection.REWARD, verdict.error)
                return None
            rewards = [Reward(0.0)] * len(samples)
        by_episode = {sample.episode: reward for sample, reward in zip(samples, rewards, strict=True)}
        self.history.apply(Rewarded(group.id, by_episode))
        return self._filter(group)

    def _filter(self, group: Group) -> Failure | None:
        """Call the filter with a group that is complete and rewarded; return the failure if it ends the step."""
        if self.dynamic_filter is None or group.id in self.state.ready or group.id in self.quarantined:
            return None
        if not (group.complete and group.rewarded):
            return None
        try:
            with UserCode():
                accepted = bool(self.dynamic_filter(group))
        except Exception as error:
            failure = Failure("filter", group.samples[0].id, group.prompt.id, described(error))
            self.stats.add_failure(failure)
            if self.faults.on_reward_error == "raise":
                return failure
            self.quarantined.add(group, Rejection.FILTER, failure.error)
            return None
        if accepted:
            self.history.apply(Accepted(group.id))
        else:
            self._reject(group, Rejection.FILTER)
        return None

    async def close(self) -> None:
        """Cancel every reward computation; the samples stay unscored."""
        if self.rewards is not None:
            await self.rewards.close()
