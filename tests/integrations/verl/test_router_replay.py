"""verl's own router replay on the routes that april hands over, in a training step.

verl replays in Megatron's and in VeOmni's routers. Neither package runs here: Megatron's engine calls Transformer
Engine, and `VeOmniRouterReplay.install` imports `veomni.utils.moe_router_replay`. The controller of VeOmni's engine,
which replaces the chosen experts, is called here from the routers of transformers, at the same place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: scripts/setup_verl.sh")

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.veomni.router_replay import VeOmniRouterReplay

from april import Sample
from april.engines.routers import routers_of
from april.engines.servers.server_routes import ServerRoutes
from april.integrations.routes import whole_routes
from tests.engines.architectures import samples
from tests.engines.test_routes import engine, finish, policy_of, tokens
from tests.mixtures import as_sets, routes

SHAPE = ServerRoutes((0, 1, 2), 3, 2, 8)


class _Hook(TorchFunctionMode):
    """Passes a router's choice through verl's controller, as VeOmni's routers do."""

    def __init__(self, replay: VeOmniRouterReplay, router: Any) -> None:
        super().__init__()
        self._replay, self._router = replay, router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        chosen = self._replay.on_router_forward(self._router, args[0], result[1])
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


@contextmanager
def replaying(policy: Any, replay: VeOmniRouterReplay) -> Iterator[None]:
    forwards = {}
    for router in routers_of(policy):
        forwards[router] = router.forward

        def forward(hidden: Any, router: Any = router) -> Any:
            with _Hook(replay, router):
                return forwards[router](hidden)

        router.forward = forward
    try:
        yield
    finally:
        for router in forwards:
            del router.forward


def handed_over(sample: Sample) -> torch.Tensor:
    """Return the routes as verl's trainer gets them, [tokens, layers, top k]."""
    count = len(tokens(sample))
    output = AgentLoopOutput(
        prompt_ids=list(sample.prompt_ids),
        response_ids=sample.response_ids,
        response_mask=[1] * sample.length,
        routed_experts=whole_routes(sample.routes, count, SHAPE, np.int16),
        metrics=AgentLoopMetrics(),
    )
    routed: torch.Tensor = output.as_dict()["routed_experts"]
    assert routed.shape == (count, SHAPE.all_layers, SHAPE.top_k)
    return routed


def logprobs(policy: Any, sample: Sample, targets: torch.Tensor | None) -> torch.Tensor:
    """Return the log-probabilities of a response, with routes as `_prepare_router_replay_inputs` arms them."""
    replay, ids = VeOmniRouterReplay(), torch.tensor([tokens(sample)])
    if targets is not None:
        replay.begin_replay()
        replay.begin_microbatch(targets=list(targets.to(torch.int64).unbind(dim=1)))
    with replaying(policy, replay):
        scores = policy(input_ids=ids).logits[0].log_softmax(-1)
    assert targets is None or replay.num_fired == replay.num_targets
    return scores[len(sample.prompt_ids) - 1 : -1].gather(-1, ids[0, len(sample.prompt_ids) :, None])[:, 0]


async def test_verl_trains_with_the_experts_of_the_engine() -> None:
    """The trainer's routers are perturbed, so that they choose otherwise, as routers of other kernels do."""
    policy = policy_of()
    done = samples()[:4]
    await finish(engine(policy), done)
    trained = copy.deepcopy(policy).train()
    torch.manual_seed(0)
    with torch.no_grad():
        for router in routers_of(trained):
            router.weight.add_(0.1 * router.weight.std() * torch.randn_like(router.weight))
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
    live, replayed, losses, differing = [], [], [], 0
    for sample in done:
        rows = handed_over(sample)
        drawn = torch.tensor(sample.logprobs, dtype=torch.float64)
        # By the drawing weights and their routes, nothing changes; routes of the neighbouring token are wrong.
        assert (logprobs(policy, sample, rows) - drawn).abs().max() < 1e-6
        assert (logprobs(policy, sample, rows.roll(1, 0)) - drawn).abs().max() > 1e-3
        own = routes(trained, tokens(sample))[:-1]
        differing += int((as_sets(own) != as_sets(rows[:-1].numpy())).any(-1).sum())
        live.append((logprobs(trained, sample, None) - drawn).abs().mean().item())
        scores = logprobs(trained, sample, rows)
        replayed.append((scores - drawn).abs().mean().item())
        losses.append(-scores.mean())
    assert differing, "the trainer's own routers would have chosen other experts"
    assert np.mean(replayed) < np.mean(live)
    print(
        f"mean |log-probability difference|: {np.mean(live):.4f} by its own routers, {np.mean(replayed):.4f} replayed"
    )
    torch.stack(losses).mean().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in routers_of(trained)), "gradients reach the routers"
    before = [router.weight.detach().clone() for router in routers_of(trained)]
    optimizer.step()
    assert not any(torch.equal(router.weight, old) for router, old in zip(routers_of(trained), before, strict=True))


async def test_the_last_token_is_routed_by_the_live_router() -> None:
    """No pass of the engine has consumed it; verl appends a row of zeros, whose duplicates its controller ignores."""
    policy, (sample, *_) = policy_of(), samples()
    await finish(engine(policy), [sample])
    rows = handed_over(sample)
    assert not rows[-1].any()
    replay = VeOmniRouterReplay()
    replay.begin_replay()
    replay.begin_microbatch(targets=list(rows.to(torch.int64).unbind(dim=1)))
    with replaying(policy, replay):
        used = routes(policy, tokens(sample))
    np.testing.assert_array_equal(as_sets(used), as_sets(routes(policy, tokens(sample))))
