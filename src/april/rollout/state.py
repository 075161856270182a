"""What rollouts are between two steps, and how that survives: saved whole, and gone through again from the journal.

Invariants:
- what was saved and loaded goes on with the same groups, the same tokens and the same prompts;
- events of the journal behind a loaded state happen again in their order, and leave what they left the first time: the
  steps that were handed to training come out once more, with the same groups at the same policy versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from april.rollout.admission.admission import Admission
from april.rollout.admission.lengths import LengthModel
from april.rollout.buffer import Buffer
from april.rollout.engine import Chunk
from april.rollout.journal import Admitted, DamageError, Event, Journal, Rejected, Rewarded, Trained, redo
from april.rollout.params import FaultPolicy, RolloutParams
from april.rollout.staleness import StalenessError, feasible
from april.rollout.step import Span, Step
from april.rollout.trajectory import Group, Prompt


class RolloutState:
    """Everything about rollouts that a restart needs. `RolloutScheduler` says what the arguments are."""

    def __init__(
        self,
        prompts: Iterable[Prompt],
        lengths: LengthModel,
        admission: Admission,
        params: RolloutParams,
        faults: FaultPolicy,
        dynamic_filter: Callable[[Group], bool] | None,
        seed: int,
        journal: Journal | None,
    ) -> None:
        self.prompts = prompts
        self.lengths = lengths
        self.admission = admission
        self.params = params
        self.faults = faults
        self.dynamic_filter = dynamic_filter
        self.seed = seed
        self.journal = journal
        self.version = 0
        self.buffer = Buffer()
        self.ready: dict[int, Group] = {}
        """Complete groups that may be trained on: nothing can turn them away any more."""
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._cut_short: list[Span] = []
        """What a step had seen that did not come to its end; the next one has seen it too."""

    @property
    def can_reject(self) -> bool:
        """Whether a reward, or the lack of one, can turn a complete group away."""
        return self.dynamic_filter is not None or self.faults.on_reward_error == "reject"

    def state_dict(self) -> dict[str, Any]:
        """Everything a restart needs, as JSON types. Call it between steps, never while `collect` runs."""
        if self.journal is not None:
            self.journal.flush()
        return {
            "version": self.version,
            "seed": self.seed,
            "buffer": self.buffer.state_dict(),
            "prompts": self._position(),
            "ready": list(self.ready),
            "cut_short": [asdict(span) for span in self._cut_short],
            "lengths": self.lengths.state_dict(),
            "admission": self.admission.state_dict(),
            "journal": None if self.journal is None else self.journal.mark,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`: same groups, same tokens, same data position."""
        self.version, self.seed = state["version"], state["seed"]
        self.buffer = Buffer.from_state_dict(state["buffer"])
        self.ready = {id: self.buffer.groups[id] for id in state.get("ready", ())}
        self._check_bound(self.version, "the saved groups cannot all be trained on")
        if state.get("lengths"):
            self.lengths.load_state_dict(state["lengths"])
            self.admission.load_state_dict(state["admission"])
        self._cut_short = [Span(**span) for span in state.get("cut_short", ())]
        self._go_to(state["prompts"])
        if self.journal is not None:
            self.journal.seek(state.get("journal"))

    def _position(self) -> Any:
        """The place in the prompts, if they know it."""
        return self.prompts.state_dict() if hasattr(self.prompts, "state_dict") else None

    def _go_to(self, position: Any) -> None:
        if position is not None:
            self.prompts.load_state_dict(position)  # type: ignore[attr-defined]
            self._prompts = iter(self.prompts)

    def _check_bound(self, version: int, otherwise: str) -> None:
        begun = [first for group in self.buffer if (first := group.first_version) is not None]
        size, bound = self.params.rollout_batch_size, self.params.max_staleness
        if bound is not None and not feasible(begun, version, size, bound):
            raise StalenessError(f"{otherwise} within max_staleness = {bound} at rollout_batch_size = {size}")

    def _happened(self, event: Event) -> None:
        if self.journal is not None:
            self.journal.record(event)

    def _learn(self, step: Step) -> None:
        spans = step.spans
        before, after = [span.before for span in spans], [span.after for span in spans]
        self.lengths.observe(before, after, [span.outcome == "finished" for span in spans])
        self.lengths.observe_groups([[sample.length for sample in group.samples] for group in step.groups])
        self.admission.observe(step)

    def _replay(self) -> Step | None:
        """What the journal holds happens again, up to the next step that was handed over; None if there is none."""
        if self.journal is None:
            return None
        prompts = None
        seen: dict[str, Span] = {}
        for event in self.journal.replay():
            self._redo(event, self.journal)
            match event:
                case Admitted():
                    prompts = event.prompts
                case Chunk():
                    self._sampled_again(event, seen)
                case Rewarded():
                    self._ready_again(event.group_id)
                case Rejected():
                    self.ready.pop(event.group_id, None)
                case Trained():
                    self._go_to(prompts)
                    return self._handed_over_again(event.step)
        self._go_to(prompts)
        self._cut_short += seen.values()
        if self.dynamic_filter is not None:  # a verdict of the filter that was not written is found again
            self.ready = {id: group for id, group in self.ready.items() if self.dynamic_filter(group)}
        return None

    def _redo(self, event: Event, journal: Journal) -> None:
        try:
            redo(event, self.buffer)
            if isinstance(event, Trained):
                self.buffer.check()
        except (LookupError, ValueError, TypeError, AssertionError) as error:
            raise DamageError(
                f"{journal.path}: event {journal.position} does not follow from those before it: {error}"
            ) from None

    def _sampled_again(self, chunk: Chunk, seen: dict[str, Span]) -> None:
        group_id, index = map(int, chunk.sample_id.split("."))
        length = self.buffer.groups[group_id].samples[index].length
        span = seen.setdefault(chunk.sample_id, Span(chunk.sample_id, group_id, 0.0, length - len(chunk.token_ids)))
        span.after = length
        if chunk.finish is not None:
            span.outcome = "finished"
            self._ready_again(group_id)

    def _ready_again(self, id: int) -> None:
        group = self.buffer.groups[id]
        if group.complete and (group.rewarded or not self.can_reject):
            self.ready.setdefault(id, group)

    def _handed_over_again(self, step: Step) -> Step:
        if step.version != self.version:
            raise StalenessError(
                f"the next step of the journal was trained on at policy version {step.version}, but this is "
                f"{self.version}: update the weights as often as before"
            )
        for group in step.groups:
            self.ready.pop(group.id, None)
        self._cut_short = []
        self.admission.plan(
            self.params.rollout_batch_size
        )  # it follows from what was observed, and is part of the state
        self._learn(step)
        return step
