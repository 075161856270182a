"""A group: the samples of one prompt, which complete, are rewarded and are trained on together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.seeds import sample_seeds
from april.rollout.trajectory.segment import ENVIRONMENT, Segment
from april.rollout.trajectory.transition import Transition


@dataclass(slots=True)
class Group:
    """One prompt's samples: the unit that completes, is rewarded and is trained on together.

    `id` counts admissions over the whole run, so it orders groups by age.
    """

    id: int
    prompt: Prompt
    samples: list[Sample]
    _first_version: int | None = field(default=None, init=False, repr=False, compare=False)
    _finished: int = field(default=0, init=False, repr=False, compare=False)
    """Number of leading samples known to have finished, so that `complete` examines each sample once."""

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

    def restart(self, index: int) -> None:
        """Restart the episode of one sample; the group's first token may then have a later version."""
        self.samples[index].restart()
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
            sample_type(id, index, prompt.token_ids, sampling, own, id=f"{name}.{index}")
            for index, own in enumerate(sample_seeds(seed, id, n, evaluation))
        ]
        return cls(id, prompt, samples)

    def to_dict(self) -> dict[str, Any]:
        """Return the group as JSON types; `from_dict` restores it exactly."""
        sampling = self.samples[0].sampling
        return {
            "id": self.id,
            "prompt": self.prompt.to_dict(),
            "sampling": sampling.to_dict(),
            "samples": [sample.to_dict() for sample in self.samples],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Group:
        prompt = Prompt.from_dict(state["prompt"])
        sampling = SamplingParams.from_dict(state["sampling"])
        samples = []
        for saved in state["samples"]:
            segments = [Segment(version, list(ids), list(logprobs)) for version, ids, logprobs in saved["segments"]]
            finish = FinishReason(saved["finish"]) if saved["finish"] else None
            samples.append(
                Sample(
                    state["id"],
                    saved["index"],
                    prompt.token_ids,
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
                )
            )
        return cls(state["id"], prompt, samples)
