"""Routes that the embedded engine hands out, against plain forward passes of the versions that computed them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from april import Chunk, Sample
from april.engines.embedded import EmbeddedEngine
from april.engines.routers import RouterReplay
from april.rollout.trajectory.routes import Experts
from april.rollout.trajectory.routes import RouterReplay as Setting
from tests.engines.architectures import model as dense
from tests.engines.architectures import perturb, responses, run, samples
from tests.engines.computed_routes import CachedBy, CacheLog, computed_routes, continued
from tests.mixtures import ARCHITECTURES, as_sets, mixture, routes


def policy_of(architecture: str = "Qwen3Moe") -> Any:
    # In float64, no rounding decides between two experts; grouped products do not take it.
    policy = mixture(architecture).double()
    policy.set_experts_implementation("eager")
    return policy


POLICY = policy_of()


def engine(policy: Any, replay: Setting = "recorded", **config: Any) -> EmbeddedEngine:
    return EmbeddedEngine(policy, **{"kv_cache_bytes": 1 << 24, "max_num_seqs": 9, "router_replay": replay, **config})


def take(done: Iterable[Sample], chunks: Iterable[Chunk], latest: bool = False) -> None:
    """Append chunks as `RolloutState.absorb` does."""
    by_id = {sample.id: sample for sample in done}
    for chunk in chunks:
        sample = by_id[chunk.sample_id]
        if chunk.routes is not None:
            sample.check_routes(chunk.routes, len(chunk.token_ids))
        sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        if chunk.routes is not None:
            sample.route(chunk.routes, chunk.version, latest)


async def finish(subject: EmbeddedEngine, done: list[Sample], latest: bool = False) -> None:
    for sample in done:
        if sample.finish is None:
            subject.submit(sample)
    while chunks := await subject.poll():
        take(done, chunks, latest)


def held(sample: Sample) -> Experts:
    assert sample.routes is not None
    assert sample.missing_routes == 0
    return sample.routes.experts


def tokens(sample: Sample) -> list[int]:
    return [*sample.prompt_ids, *sample.response_ids]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_every_consumed_token_has_the_routes_of_a_plain_forward_pass(architecture: str) -> None:
    policy = policy_of(architecture)
    subject, done = engine(policy, max_num_seqs=4, prefill_chunk=5), samples()
    await finish(subject, done)
    for sample in done:
        expected = routes(policy, tokens(sample))[:-1]
        np.testing.assert_array_equal(as_sets(held(sample)), as_sets(expected))


ROUNDS = st.lists(
    st.tuples(
        st.permutations(range(9)),
        st.integers(1, 9),
        st.integers(0, 30),
        st.sampled_from(["resume", "some", "forget", "lose", "shortage", "update", "update", "update"]),
    ),
    max_size=5,
)
"""Order of the samples, number of submitted ones, polls, and what follows.

some: every second sample is interrupted; otherwise all are. lose: tokens and caches are lost, as with a server that
dies. shortage: the next forward pass runs out of memory, and the KV cache is given up.
"""


class Shortages:
    """Lets forward passes of an engine run out of memory."""

    def __init__(self, subject: EmbeddedEngine) -> None:
        self.due = False
        model: Any = subject._model
        self._logits, model.logits = model.logits, self._short

    def _short(self, *arguments: Any) -> Any:
        if self.due:
            self.due = False
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self._logits(*arguments)


@settings(max_examples=18, deadline=None)
@given(
    rounds=ROUNDS,
    replay=st.sampled_from(["recorded", "latest"]),
    on_update=st.sampled_from(["recompute", "redraft", "keep", "keep"]),
    max_num_seqs=st.integers(1, 9),
    prefill_chunk=st.integers(1, 40),
    kv_cache_bytes=st.sampled_from([1 << 24, 400_000, 220_000]),
    stream_interval=st.integers(1, 4),
)
def test_no_schedule_loses_or_changes_a_row(
    rounds: list[tuple[list[int], int, int, str]], replay: Setting, **config: Any
) -> None:
    """With recompute, "recorded" rows are of the version that drew the next token, "latest" ones of the last version.

    Drafts are drawn again by the newest version, so that all rows are of that one. With keep, a row is what the engine
    computed on keys and values of the versions that computed them first, unless these were lost.
    """
    policy, versions, latest = copy.deepcopy(POLICY), list[Any](), replay == "latest"
    versions.append(copy.deepcopy(policy))

    async def schedule() -> None:
        subject, done = engine(policy, replay, **config), samples()
        log, shortages = CacheLog(subject) if config["on_update"] == "keep" else None, Shortages(subject)
        in_flight: set[str] = set()
        for order, submitted, polls, then in rounds:
            for sample in [done[i] for i in order[:submitted]]:
                if sample.finish is None and sample.id not in in_flight:
                    subject.submit(sample)
                    in_flight.add(sample.id)
            for _ in range(polls):
                take(done, await subject.poll(), latest)
            stopped = [done[i].id for i in (order[::2] if then == "some" else order)]
            chunks = await subject.interrupt(stopped)
            in_flight -= {*stopped, *(sample.id for sample in done if sample.finish is not None)}
            if then != "lose":
                take(done, chunks, latest)
            shortages.due |= then == "shortage"
            if then in ("forget", "lose"):
                subject.forget()
            elif then == "update":
                perturb(policy, len(versions))
                versions.append(copy.deepcopy(policy))
                await subject.update_weights(len(versions) - 1)
                if config["on_update"] == "redraft":
                    for sample in done:
                        sample.redraft()
        take(done, await subject.interrupt(), latest)
        await finish(subject, done, latest)
        for sample in done:
            if log is None:
                _compare(sample, versions, latest)
            else:
                _compare_computed(sample, versions, log, latest)

    asyncio.run(schedule())


async def test_a_row_that_was_dropped_with_tokens_behind_a_stop_string_is_supplied_again() -> None:
    """The engine has consumed the last token that is kept, whose row came with the tokens that are not."""
    subject, done = engine(POLICY, stream_interval=6), samples()[:3]
    for sample in done:
        subject.submit(sample)
    cut = set()
    while len(cut) < len(done):
        for chunk in await subject.poll():
            sample = next(sample for sample in done if sample.id == chunk.sample_id)
            if sample.id not in cut:
                cut.add(sample.id)
                assert len(chunk.token_ids) > 2
                assert chunk.routes is not None
                end = len(sample.prompt_ids) + sample.length + 2
                take(
                    [sample],
                    [
                        chunk._replace(
                            token_ids=chunk.token_ids[:2],
                            logprobs=chunk.logprobs[:2],
                            finish=None,
                            routes=chunk.routes.up_to(end - 1),
                        )
                    ],
                )
    await subject.interrupt()
    for sample in done:
        sample.extend([7, 8], [-1.0, -1.0], 0)  # in the place of an observation
    await finish(subject, done)
    for sample in done:
        np.testing.assert_array_equal(as_sets(held(sample)), as_sets(routes(POLICY, tokens(sample))[:-1]))


def _compare(sample: Sample, versions: list[Any], latest: bool) -> None:
    found, start = as_sets(held(sample)), len(sample.prompt_ids)
    if latest:
        expected = routes(versions[sample.segments[-1].version], tokens(sample))[:-1]
        np.testing.assert_array_equal(found, as_sets(expected))
        return
    for segment in sample.segments:
        expected = as_sets(routes(versions[segment.version], tokens(sample)))
        # Row i predicted token i + 1; rows in front of the response are of the version that prefilled first.
        first, end = start - 1, start + len(segment) - 1
        np.testing.assert_array_equal(found[first:end], expected[first:end])
        start += len(segment)


def _compare_computed(sample: Sample, versions: list[Any], log: CacheLog, latest: bool) -> None:
    ids, found, prompt = tokens(sample), as_sets(held(sample)), len(sample.prompt_ids)

    def expected(cached_by: CachedBy) -> Any:
        return as_sets(computed_routes(versions, ids[:-1], cached_by))

    if latest:
        np.testing.assert_array_equal(found, expected(log.newest[sample.id]))
        return
    drawn = log.drawn[sample.id]
    rows = {id(cached): expected(cached) for cached in log.all[sample.id] if cached}
    for place in range(prompt - 1, len(found)):
        np.testing.assert_array_equal(found[place], rows[id(drawn[place])][place])
    # No policy draws the next token of these: each is of any pass that computed it.
    for place in range(prompt - 1):
        assert any((found[place] == row[place]).all() for row in rows.values() if len(row) > place)


@pytest.mark.parametrize("replay", ["recorded", "latest"])
async def test_keep_hands_out_what_was_computed_on_old_keys_and_values(replay: Setting) -> None:
    """Nothing is computed twice, so that both settings have the same rows."""
    policy, versions = copy.deepcopy(POLICY), [copy.deepcopy(POLICY)]
    subject, done = engine(policy, replay, on_update="keep"), samples()
    for version in (1, 2):
        for sample in done:
            subject.submit(sample)
        for _ in range(6):
            take(done, await subject.poll(), replay == "latest")
        take(done, await subject.interrupt(), replay == "latest")
        perturb(policy, version)
        versions.append(copy.deepcopy(policy))
        await subject.update_weights(version)
    await finish(subject, done, replay == "latest")
    differing = 0
    for sample in done:
        cache, expected, consumed = DynamicCache(config=policy.config), [], 0
        for segment in sample.segments:
            # All tokens before the segment's last one are consumed to draw it.
            end = consumed + len(segment) + (len(sample.prompt_ids) - 1 if not consumed else 0)
            expected.append(continued(versions[segment.version], tokens(sample)[consumed:end], cache))
            consumed = end
        np.testing.assert_array_equal(as_sets(held(sample)), as_sets(np.concatenate(expected)))
        differing += int((as_sets(held(sample)) != as_sets(routes(policy, tokens(sample))[:-1])).any())
    assert differing, "the last version alone would have routed otherwise"


async def test_routes_cost_nothing_and_change_no_token() -> None:
    with_routes, without = samples(), samples()
    await finish(engine(POLICY), with_routes)
    await run(engine(POLICY, "off"), without)
    assert responses(with_routes) == responses(without)
    assert all(sample.routes is None for sample in without)


def test_a_policy_without_routers_is_refused() -> None:
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no routers"):
        engine(dense())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_replayed_experts_replace_those_that_routers_choose(architecture: str) -> None:
    policy, ids = policy_of(architecture), torch.arange(2, 32)[None]
    own = routes(policy, ids[0].tolist())
    replay, plain = RouterReplay(policy), policy(input_ids=ids).logits
    given, changed = torch.from_numpy(own), torch.from_numpy((own + 1) % 8)
    with replay.installed():
        replay.routes = given
        torch.testing.assert_close(policy(input_ids=ids).logits, plain)
        replay.routes = torch.full_like(given, replay.unknown)
        torch.testing.assert_close(policy(input_ids=ids).logits, plain)
        replay.routes = changed
        np.testing.assert_array_equal(routes(policy, ids[0].tolist()), changed.numpy())
        # Gradients reach the router through the weights of the replayed experts.
        policy(input_ids=ids).logits.square().mean().backward()
    gates = [p.grad for name, p in policy.named_parameters() if name.endswith("gate.weight")]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in gates)
    torch.testing.assert_close(policy(input_ids=ids).logits, plain)


def test_a_router_that_chooses_otherwise_is_refused() -> None:
    policy = mixture()
    replay = RouterReplay(policy)
    for router in policy.modules():
        if type(router).__name__ == "Qwen3MoeTopKRouter":
            own = type(router).forward

            def forward(hidden: torch.Tensor, router: Any = router, own: Any = own) -> Any:
                logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
                order = logits.argsort(-1, descending=True)[:, :2]
                return logits, logits.gather(-1, order), order

            router.forward = forward
    with replay.installed():
        replay.routes = torch.zeros(8, 3, 2, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="chooses experts in a way"):
            policy(input_ids=torch.arange(8)[None])
