"""A group: the samples of one prompt, which complete, are rewarded and are trained on together.

Invariants:
- the first samples are the first sequences of the group's episodes, in order; samples that branch off follow, each
  after the one that it shares tokens with, and no index is used twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.features import Feature, features_from_json
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.seeds import branch_seed, sample_seeds
from april.rollout.trajectory.segment import ENVIRONMENT, Segment
from april.rollout.trajectory.transition import Origin, Transition


@dataclass(slots=True)
class Group:
    """One prompt's samples: the unit that completes, is rewarded and is trained on together.

    `id` counts admissions over the whole run, so it orders groups by age.
    """

    id: int
    prompt: Prompt
    samples: list[Sample]
    next_index: int = 0
    """Index of the next sample that branches off."""
    _first_version: int | None = field(default=None, init=False, repr=False, compare=False)
    _finished: int = field(default=0, init=False, repr=False, compare=False)
    """Number of leading samples known to have finished, so that `complete` examines each sample once."""

    def __post_init__(self) -> None:
        self.next_index = self.next_index or len(self.samples)

    @property
    def size(self) -> int:
        """Number of episodes."""
        samples = self.samples
        return len(samples) if samples[-1].index == samples[-1].episode else len({s.episode for s in samples})

    def episode(self, index: int) -> list[Sample]:
        """Return the sequences of an episode."""
        return [sample for sample in self.samples if sample.episode == index]

    @property
    def episodes(self) -> list[list[Sample]]:
        """The sequences of each episode."""
        episodes = [[sample] for sample in self.samples[: self.size]]
        for sample in self.samples[len(episodes) :]:
            episodes[sample.episode].append(sample)
        return episodes

    @property
    def outcomes(self) -> list[Sample]:
        """For each episode the sample that it ended with, which its reward depends on."""
        if (size := self.size) == len(self.samples):
            return self.samples
        outcomes = self.samples[:size]
        for sample in self.samples:
            if sample.transitions and sample.transitions[-1].done:
                outcomes[sample.episode] = sample
        return outcomes

    @property
    def complete(self) -> bool:
        samples, finished = self.samples, self._finished
        while finished < len(samples) and samples[finished].finish is not None:
            finished += 1
        self._finished = finished
        return finished == len(samples)

    @property
    def rewarded(self) -> bool:
        return None not in [sample.reward for sample in self.samples]

    def reward(self, rewards: Mapping[int, Reward]) -> None:
        """Set the rewards of episodes, by the episodes' indices: of all sequences, with its `info` at the outcome."""
        outcomes = self.outcomes
        for episode, reward in rewards.items():
            sample = outcomes[episode]
            sample.reward, sample.reward_info = reward.value, reward.info
        if len(outcomes) < len(self.samples):
            for sample in self.samples:
                if sample.episode in rewards:
                    sample.reward = rewards[sample.episode].value

    @property
    def first_version(self) -> int | None:
        """The policy version of the group's first token; None while none was sampled."""
        if self._first_version is None:  # versions never decrease, so the first token stays the oldest
            first = min([s.segments[0].version for s in self.samples if s.segments], default=None)
            # ENVIRONMENT is the smallest version: a response that begins with an observation hides policy tokens.
            if first == ENVIRONMENT:
                first = min([v for s in self.samples if (v := s.first_version) is not None], default=None)
            self._first_version = first
        return self._first_version

    @property
    def tokens(self) -> int:
        """Response tokens that policies sampled, over all samples."""
        return sum([sample.length - sample.environment_tokens for sample in self.samples])

    @property
    def environment_tokens(self) -> int:
        """Response tokens that environments inserted, over all samples."""
        return sum([sample.environment_tokens for sample in self.samples])

    def branch(
        self,
        index: int,
        episode: int,
        origin: Origin,
        suffix: Sequence[int],
        transition: Transition,
        features: Sequence[Feature] = (),
    ) -> None:
        """Begin the sample with this index, with the prompt that a program has asked for: the first one of an episode,
        or a new one.

        Args:
            suffix: tokens of the prompt after those that it shares.
            features: images among those tokens.

        Raises:
            ValueError, LookupError: the sample has begun already, or its index or its origin does not exist.
        """
        if origin.parent is not None and self.sample(origin.parent).episode != episode:
            raise ValueError(f"sample {origin.parent} does not belong to episode {episode}")
        prompt_ids, images = (*self.shared(origin), *suffix), (*self.shared_features(origin), *features)
        if index == episode:
            self.samples[index].begin(origin, prompt_ids, transition, images)
            return
        if index < self.size or any(sample.index == index for sample in self.samples):
            raise ValueError(f"sample {index} exists already")
        first = self.samples[episode]
        name = first.id.rpartition(".")[0]
        # Not by the index, which depends on how the group's episodes alternate: a repeated run draws the same tokens.
        seed = branch_seed(first.seed, index if transition.number is None else transition.number)
        sample = type(first)(self.id, index, (), first.sampling, seed, id=f"{name}.{index}", episode=episode)
        sample.begin(origin, prompt_ids, transition, images)
        self.samples.append(sample)
        self.next_index = max(self.next_index, index + 1)

    def sample(self, index: int) -> Sample:
        """Return the sample with this index.

        Raises:
            LookupError: there is none.
        """
        if index < len(self.samples) and (sample := self.samples[index]).index == index:
            return sample
        for sample in reversed(self.samples):
            if sample.index == index:
                return sample
        raise LookupError(f"group {self.id} has no sample {index}")

    def shared(self, origin: Origin) -> tuple[int, ...]:
        """Return the tokens that a prompt shares with another sequence of its episode."""
        if origin.parent is None:
            return ()
        parent = self.sample(origin.parent)
        tokens = (*parent.prompt_ids, *parent.response_ids)
        if origin.shared > len(tokens):
            raise ValueError(f"sample {origin.parent} has no {origin.shared} tokens")
        return tokens[: origin.shared]

    def shared_features(self, origin: Origin) -> tuple[Feature, ...]:
        """Return the images among the tokens of `shared`."""
        return () if origin.parent is None else self.sample(origin.parent).features_between(0, origin.shared)

    def restart(self, episode: int) -> None:
        """Restart an episode; the group's first token may then have a later version."""
        first = self.samples[episode]
        first.restart()
        first.prompt_ids, first.features = self.prompt.token_ids, self.prompt.features
        self.drop([sample for sample in self.samples if sample.episode == episode and sample is not first])

    def drop(self, samples: Sequence[Sample]) -> None:
        """Remove samples that branched off."""
        if samples:
            dropped = {sample.index for sample in samples}
            self.samples = [sample for sample in self.samples if sample.index not in dropped]
            for sample in self.samples:
                if sample.origin is not None and sample.origin.parent in dropped:
                    sample.origin = Origin()
        self._first_version, self._finished = None, 0

    def redraft(self) -> None:
        """Turn every response into a draft."""
        for sample in self.samples:
            sample.redraft()
        self._first_version, self._finished = None, 0

    @property
    def environment_seed(self) -> int:
        """Seed of the environments: the same for all samples, so that they get the same problem."""
        return self.samples[0].seed % 2**31

    def staleness(self, version: int) -> int:
        """Weight updates between the group's first token and a training step that starts from `version`."""
        first = self.first_version
        return 0 if first is None else version - first

    @classmethod
    def start(
        cls,
        id: int,
        prompt: Prompt,
        n: int,
        sampling: SamplingParams,
        seed: int,
        evaluation: bool = False,
        sample_type: type[Sample] = Sample,
    ) -> Group:
        """Return a new group of `n` samples. Each sample's seed follows from the run's `seed`, the group and the index.

        Args:
            evaluation: give the samples ids and seeds that no training sample has.
            sample_type: class of the samples.
        """
        name = f"evaluation {id}" if evaluation else str(id)
        samples = [
            sample_type(id, index, prompt.token_ids, sampling, own, id=f"{name}.{index}", features=prompt.features)
            for index, own in enumerate(sample_seeds(seed, id, n, evaluation))
        ]
        return cls(id, prompt, samples)

    def to_dict(self) -> dict[str, Any]:
        """Return the group as JSON types and `Routes`; `from_dict` restores it exactly."""
        sampling = self.samples[0].sampling
        return {
            "id": self.id,
            "prompt": self.prompt.to_dict(),
            "sampling": sampling.to_dict(),
            "samples": [sample.to_dict() for sample in self.samples],
            "next_index": self.next_index,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Group:
        prompt = Prompt.from_dict(state["prompt"])
        sampling = SamplingParams.from_dict(state["sampling"])
        samples: list[Sample] = []
        group = cls(state["id"], prompt, samples, state["next_index"])
        for saved in state["samples"]:
            segments = [Segment(version, list(ids), list(logprobs)) for version, ids, logprobs in saved["segments"]]
            finish = FinishReason(saved["finish"]) if saved["finish"] else None
            samples.append(
                Sample(
                    state["id"],
                    saved["index"],
                    group._prompt(saved),
                    sampling,
                    saved["seed"],
                    segments,
                    finish,
                    saved["reward"],
                    sum(map(len, segments)),
                    sum(len(segment) for segment in segments if segment.version == ENVIRONMENT),
                    saved["reward_info"],
                    transitions=tuple(Transition(**one) for one in saved.get("transitions", ())),
                    turn_ended=saved.get("turn_ended", False),
                    attempt=saved.get("attempt", 0),
                    state=saved.get("state"),
                    draft=saved.get("draft", ()),
                    episode=saved.get("episode", -1),
                    cut=saved.get("cut"),
                    routes=saved.get("routes"),
                    filled_routes=saved.get("filled_routes", 0),
                    features=(*group._begun_features(saved), *features_from_json(saved.get("features", ()))),
                )
            )
            samples[-1].restore_origin(saved.get("origin"))
        return group

    def _prompt(self, saved: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the prompt of a saved sample; the samples before it are restored already."""
        if "origin" not in saved:
            return self.prompt.token_ids
        parent, shared, suffix = saved["origin"]
        return (*self.shared(Origin(parent, shared)), *suffix)

    def _begun_features(self, saved: Mapping[str, Any]) -> tuple[Feature, ...]:
        """Return the images of a saved sample that are stored elsewhere."""
        return self.shared_features(Origin(*saved["origin"][:2])) if "origin" in saved else self.prompt.features
