"""Rollouts for slime's trainer.

Invariants:
- a rollout is exactly `rollout_batch_size` complete groups, each next to each other, every sample with its own prompt
  and label;
- a sample is scored once, by slime's own reward models and hooks, with the log-probabilities of its sampling; every
  group from slime's data source is in the buffer, handed to training, or rejected by slime's filter;
- after a rollout slime's servers run no request of april's, so cache flushes and weight updates find them idle;
- the buffer is part of slime's checkpoint, with the state of its data source; so is a batch that was returned for a
  later rollout than the checkpoint's (slime's `train_async.py` is one rollout ahead);
- evaluation is slime's own and neither reads nor changes the buffer.

`train_async.py` generates during training. A group starts whenever one is ready then, unless the servers have waited
for training.

slime starts and stops the servers and updates their weights. april streams from each server directly, because slime's
router does not forward control calls.
"""

from __future__ import annotations

import json
import logging
import time
from argparse import Namespace
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample as SlimeSample

from april.disk import as_json
from april.engines.servers.stream_interval import StreamInterval
from april.integrations.adapter import RolloutAdapter
from april.integrations.generating_code import UNLIMITED, result_of, stop_strings
from april.integrations.routes import route_metrics, shape_of, whole_routes
from april.integrations.slime.dataset_images import FIELDS, DatasetImages, images_of
from april.integrations.slime.functions import GenerateFunction
from april.integrations.slime.samples import DIVIDED, differs, mark_unfinished, returned, sampled, scored
from april.integrations.slime.servers import connect
from april.integrations.slime.settings import check_settings, params_of
from april.integrations.state_format import check_format, with_format
from april.integrations.stop_tokens import TRUSTED, stop_tokens
from april.integrations.support_sets import SupportSets
from april.rollout.engine import Engine
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)

FORMAT = 5

IDLE = 0.5
"""With `train_async.py`, groups start early only if the servers waited between two rollouts for less than this share of
the duration of the first. Otherwise training is slower, and a group that starts early is only staler."""

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Groups that were returned for a rollout, at a policy version."""

    rollout_id: int
    version: int
    groups: list[Group]

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any] | None) -> Batch | None:
        """Restore `to_dict`; None stays None."""
        if saved is None:
            return None
        return cls(saved["rollout_id"], saved["version"], [Group.from_dict(group) for group in saved["groups"]])

    def to_dict(self) -> dict[str, Any]:
        return {
            "rollout_id": self.rollout_id,
            "version": self.version,
            "groups": [group.to_dict() for group in self.groups],
        }


def support_sets_of(args: Namespace, saved: Mapping[str, Any] | None) -> SupportSets | None:
    """Return the support sets, restored from a checkpoint, or None if slime does not train on them.

    Raises:
        ValueError: the checkpoint lacks the support sets of its unfinished samples.
    """
    wanted, known = args.rollout_top_p != 1, saved and saved["support_sets"]
    if saved is not None and wanted != (known is not None):
        was = "1" if known is None else "not 1"
        raise ValueError(
            f"--rollout-top-p {args.rollout_top_p}: the unfinished samples of slime's checkpoint were started while it "
            f"was {was}: set it as it was"
        )
    return SupportSets(known) if wanted else None


class SlimeRollouts:
    """The rollout buffer between slime's calls.

    slime's samples of a prompt are the prompt's metadata; the changes that slime's hooks and reward models made to a
    finished sample are kept under `slime` in its reward info.

    Args:
        args: slime's arguments.
        data_source: returns a new group of samples from `get_samples(1)`.
        state: `state_dict` to restore.
    """

    def __init__(self, args: Namespace, data_source: Any, state: Mapping[str, Any] | None = None) -> None:
        check_settings(args)
        self.args = args
        self.data_source = data_source
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=TRUSTED)
        self.drawn = 0
        self._images = DatasetImages(args, self.tokenizer, data_source)
        self._adapter: RolloutAdapter | None = None
        self._label: str | None = None
        self._interval = StreamInterval("auto")
        self._saved = check_format(state, FORMAT, "slime's checkpoint") if state else None
        self._batch = Batch.from_dict(self._saved["ahead"]) if self._saved is not None else None
        if self._batch is not None:
            self._images.restore(group.prompt for group in self._batch.groups)
        self._support_sets = support_sets_of(args, self._saved)
        replayed = args.use_rollout_routing_replay
        self._routes = shape_of(args.hf_checkpoint, "--use-rollout-routing-replay") if replayed else None
        self._function: GenerateFunction | None = None
        self._filter = load_function(args.dynamic_sampling_filter_path) if args.dynamic_sampling_filter_path else None
        self._gatherer = MetricGatherer()
        self._rejected: list[list[SlimeSample]] = []
        self._ahead = False
        """slime requests a rollout before it has trained on the one before, as `train_async.py` does."""
        self._began = self._ended = 0.0
        """When the latest rollout began and ended."""

    async def collect(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Return `rollout_batch_size` complete, scored groups as slime's samples.

        After a restart, return the saved batch if it was returned for this rollout and not trained on.
        """
        saved = self._adapter is None and self._batch is not None and self._batch.rollout_id == rollout_id
        metrics = {} if saved else await self._generate(rollout_id)
        assert self._batch is not None
        groups = [self._hand_over(group, self._batch.version) for group in self._batch.groups]
        if self.args.rollout_sample_filter_path is not None:
            load_function(self.args.rollout_sample_filter_path)(self.args, groups)
        if self.args.rollout_all_samples_process_path is not None:
            process = load_function(self.args.rollout_all_samples_process_path)
            process(self.args, [*groups, *self._rejected], self.data_source)
        return RolloutFnTrainOutput(samples=groups, metrics={**metrics, **self._gatherer.collect()})

    async def _generate(self, rollout_id: int) -> dict[str, Any]:
        """Generate a new batch and return its metrics."""
        engine, label = await connect(self.args, self._support_sets, self._interval, self._routes, self._images)
        try:
            adapter = await self._continue(engine, label)
            self._ahead |= self._batch is not None and self._batch.version == adapter.version
            began = time.monotonic()
            waited, generated = began - self._ended, self._ended - self._began
            adapter.scheduler.refill = self._ahead and waited < IDLE * generated
            self._began = began
            self._gatherer, self._rejected = MetricGatherer(), []
            batch = await self._watched(adapter.next_batch())
            for group in adapter.scheduler.buffer:
                mark_unfinished(group, rollout_id)
            if self._support_sets is not None:
                self._support_sets.keep(
                    {sample.id for g in (*adapter.scheduler.buffer, *batch.groups) for sample in g.samples}
                )
            self._images.keep(group.prompt for group in (*adapter.scheduler.buffer, *batch.groups))
        finally:
            await engine.close()
        self._batch = Batch(rollout_id, batch.version, batch.groups)
        self._ended = time.monotonic()
        for left_out in batch.quarantined:
            log.warning("a group was left out (%s): %s", left_out.reason, left_out.error)
        metrics = batch.metrics() | route_metrics(batch.groups, self._routes)
        return {f"rollout/april/{name}": value for name, value in metrics.items()}

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, unless the generate function fails."""
        return await (work if self._function is None else self._function.code.watch(work))

    async def state_dict(self, rollout_id: int) -> dict[str, Any]:
        """Return the buffer, as `write_state` takes it. Call it between rollouts, on slime's event loop, where rewards
        may still be computed.

        Args:
            rollout_id: the last rollout that was trained on. A batch of a later rollout is part of the state.
        """
        batch = self._batch
        ahead = batch.to_dict() if batch is not None and batch.rollout_id > rollout_id else None
        if self._adapter is None:
            return {**self._saved, "ahead": ahead} if self._saved is not None else {}
        return with_format(
            FORMAT,
            drawn=self.drawn,
            **self._adapter.state_dict(),
            ahead=ahead,
            support_sets=None if self._support_sets is None else self._support_sets.state_dict(),
        )

    async def _continue(self, engine: Engine, label: str | None) -> RolloutAdapter:
        """Return the adapter with this engine. Weights with another label, and a restart, are a new policy version."""
        same = self._adapter is not None and label == self._label
        if self._adapter is None:
            self._adapter = self._begin(engine)
            same = self._saved is None
            if self._saved is not None:
                self._restore(self._adapter, self._saved)
        adapter = self._adapter
        # slime may have replaced servers since the last rollout, so each rollout has an engine of its own.
        adapter.scheduler.engine = engine
        await adapter.update_weights(version=adapter.version if same else None)
        self._label = label
        return adapter

    def _begin(self, engine: Engine) -> RolloutAdapter:
        args = self.args
        stops = {*stop_tokens(args.hf_checkpoint, self.tokenizer), *(args.rollout_stop_token_ids or ())}
        sampling = SamplingParams(
            max_tokens=args.rollout_max_response_len,
            temperature=args.rollout_temperature,
            top_p=args.rollout_top_p,
            top_k=max(args.rollout_top_k, 0),
            stop_token_ids=tuple(sorted(stops)),
            stop=stop_strings(args.rollout_stop),
        )
        if args.custom_generate_function_path is not None:
            context = engine.capacity.context_length
            self._function = GenerateFunction(args, self.tokenizer, sampling.stop_token_ids, context)
            # Functions get --rollout-stop with the other parameters, and their requests name stop strings.
            sampling = replace(sampling, max_tokens=context, max_turns=UNLIMITED, stop=())
        self._images.warn_of_cached_embeddings()
        return RolloutAdapter(
            engine,
            params_of(args),
            extra=self.prompts(),
            reward=self._score_group if args.group_rm else self.score,
            sampling=sampling,
            reward_scope="group" if args.group_rm else "sample",
            dynamic_filter=self._keep if self._filter is not None or self._images.expected else None,
            seed=args.rollout_seed,
            episodes=None if self._function is None else self._function.code.episodes,
            decode=self.tokenizer.decode,
        )

    def _restore(self, adapter: RolloutAdapter, state: Mapping[str, Any]) -> None:
        adapter.load_state_dict(state)
        self.drawn = state["drawn"]
        self._images.restore(group.prompt for group in adapter.scheduler.buffer)

    def prompts(self) -> Iterator[Prompt]:
        """Yield the new groups of slime's data source as prompts."""
        while groups := self.data_source.get_samples(1):
            (group,) = groups
            if len(group) != self.args.n_samples_per_prompt:
                raise ValueError(f"the data source gave a group of {len(group)}, not {self.args.n_samples_per_prompt}")
            id, first = str(self.drawn), group[0]
            if self.args.custom_generate_function_path is None and not isinstance(first.prompt, str):
                raise ValueError(f"prompt {first.index} is a list of messages: set --apply-chat-template")
            has_images = bool(images_of(first))
            if has_images and self.args.custom_generate_function_path is not None:
                raise ValueError(f"prompt {first.index} has images, which generate functions do not get from april")
            if has_images:
                token_ids, features = self._images.encode(first)
                for sample in group:
                    sample.multimodal_inputs = sample.multimodal_train_inputs = None
            try:
                metadata = json.loads(as_json({"slime": [sample.to_dict() for sample in group]}))
            except (TypeError, ValueError) as error:
                raise ValueError(f"prompt {first.index} cannot be part of a checkpoint: {error}") from None
            self.drawn += 1
            if self.args.custom_generate_function_path is not None:
                yield Prompt((), id, metadata)  # the function makes the tokens
                continue
            if has_images:
                yield Prompt(tuple(token_ids), id, metadata, features=features)
                continue
            # A group that slime returned to its data source has an earlier response behind its prompt.
            given = first.tokens[: len(first.tokens) - first.response_length]
            token_ids = given or self.tokenizer.encode(first.prompt, add_special_tokens=False)
            yield Prompt(tuple(token_ids), id, metadata)

    async def _finish(self, prompt: Prompt, sample: Sample) -> SlimeSample:
        """Return slime's sample for a finished sample, after slime's hooks and before the reward."""
        slime_sample = sampled(prompt, sample)
        if prompt.features:
            self._images.attach(prompt, slime_sample)
        slime_sample.response = self.tokenizer.decode(
            sample.response_ids, skip_special_tokens=self.args.rollout_skip_special_tokens
        )
        return await apply_rollout_sample_hooks(self.args, slime_sample, evaluation=False)

    async def score(self, prompt: Prompt, sample: Sample) -> Reward:
        """Score a finished sample by slime's reward model."""
        if self._function is not None:
            return await self._score_returned(sample)
        slime_sample = await self._finish(prompt, sample)
        if slime_sample.reward is None:
            slime_sample.reward = await async_rm(self.args, slime_sample)
        return self._reward(prompt, sample, slime_sample)

    async def _score_returned(self, sample: Sample) -> Reward:
        """Score the samples that the generate function returned, unless it has scored them."""
        samples = [await apply_rollout_sample_hooks(self.args, one, evaluation=False) for one in returned(sample)]
        unscored = [one for one in samples if one.reward is None]
        if unscored:
            # As slime: a sample that the function divided is scored as a batch, and a custom reward model gets a list.
            together = result_of(sample)[DIVIDED]
            score = batched_async_rm(self.args, unscored) if together else async_rm(self.args, unscored[0])
            rewards = await score if together else [await score]
            for one, reward in zip(unscored, rewards, strict=True):
                one.reward = reward
        return self._reward_of(samples)

    def _reward_of(self, samples: Sequence[SlimeSample]) -> Reward:
        """Return the mean reward for april's metrics, with slime's samples."""
        values = [self._value(one) for one in samples]
        kept = json.loads(as_json([one.to_dict() for one in samples]))
        return Reward(sum(values) / max(len(values), 1), {"slime": kept})

    async def _score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if self._function is not None:
            return await self._score_returned_group(samples)
        group = [await self._finish(prompt, sample) for sample in samples]
        for slime_sample, reward in zip(group, await batched_async_rm(self.args, group), strict=True):
            slime_sample.reward = reward
        return [self._reward(prompt, sample, slime_sample) for sample, slime_sample in zip(samples, group, strict=True)]

    async def _score_returned_group(self, samples: Sequence[Sample]) -> list[Reward]:
        made = [returned(sample) for sample in samples]
        divided = any(result_of(sample)[DIVIDED] for sample in samples)
        # As slime, which gives the reward model one list for each sample that a function divided.
        group = made if divided else [one for (one,) in made]
        for several, reward in zip(made, await batched_async_rm(self.args, group), strict=True):
            for one in several:
                one.reward = reward
        return [self._reward_of(several) for several in made]

    def _value(self, slime_sample: SlimeSample) -> float:
        """Return slime's reward as a number."""
        try:
            return float(slime_sample.get_reward_value(self.args))
        except TypeError:  # for example a teacher's answer, which slime converts to a number after the rollout
            return 0.0

    def _reward(self, prompt: Prompt, sample: Sample, slime_sample: SlimeSample) -> Reward:
        """Return the reward for april's metrics, with the changes to slime's sample, slime's own reward included."""
        # Only changes are kept: the other fields are in the prompt's metadata or are april's tokens.
        before, after = sampled(prompt, sample).to_dict(), slime_sample.to_dict()
        if prompt.features:
            after |= dict.fromkeys(FIELDS)
        changes = {name: value for name, value in after.items() if differs(value, before.get(name))}
        value = self._value(slime_sample)
        parts = slime_sample.reward if isinstance(slime_sample.reward, dict) else {}
        return Reward(
            value, {**{name: part for name, part in parts.items() if isinstance(part, float)}, "slime": changes}
        )

    def _keep(self, group: Group) -> bool:
        """Apply slime's dynamic sampling filter, and leave out groups that slime's trainer could not train on."""
        for sample in group.samples if group.prompt.features else ():
            if reason := self._images.unsendable(group.prompt.features, [*sample.prompt_ids, *sample.response_ids]):
                log.warning("a group was left out: sample %s: %s", sample.id, reason)
                return False
        if self._filter is None:
            return True
        assert self._adapter is not None
        samples = self._scored(group)
        output = call_dynamic_filter(self._filter, self.args, samples)
        dropped: bool = should_drop_dynamic_filter_output(
            output,
            remaining_batch_size=len(self._adapter.scheduler.buffer),
            target_data_size=self.args.rollout_batch_size,
        )
        if dropped:
            self._gatherer.on_dynamic_filter_drop(reason=output.reason)
            self._rejected.append(samples)
        return not dropped

    def _scored(self, group: Group) -> list[Any]:
        samples = scored(group)
        if group.prompt.features:
            self._images.attach(group.prompt, *samples)
        return samples

    def _hand_over(self, group: Group, version: int) -> list[SlimeSample]:
        samples = self._scored(group)
        if self._support_sets is not None:
            for slime_sample, sample in zip(samples, group.samples, strict=True):
                token_ids, offsets = self._support_sets.of(sample.id, len(sample.prompt_ids), sample.length)
                slime_sample.rollout_top_p_token_ids, slime_sample.rollout_top_p_token_offsets = token_ids, offsets
        if self._routes is not None:
            for slime_sample, sample in zip(samples, group.samples, strict=True):
                whole = whole_routes(sample.routes, len(slime_sample.tokens), self._routes)
                slime_sample.rollout_routed_experts = torch.from_numpy(whole)
        if self.args.mask_offpolicy_in_partial_rollout:
            for slime_sample, sample in zip(samples, group.samples, strict=True):
                current = (sample.versions == version).tolist()
                slime_sample.loss_mask = [
                    int(own and m) for own, m in zip(current, slime_sample.loss_mask, strict=True)
                ]
        return samples
