"""The engine that AReaL's workflows get, without a trainer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("areal", reason="AReaL is not installed here: scripts/setup_areal.sh")

from areal.api import ModelRequest
from areal.api.cli_args import GenerationHyperparameters

from april import Group, Prompt, SamplingParams
from april.engines.servers.server_routes import ServerRoutes
from april.integrations.areal.workflow import EpisodeEngine
from april.rollout.trajectory.routes import RouteRows
from tests.integrations.scripted_turns import episode, turn


def test_a_response_has_the_routes_of_the_versions_that_drew_it() -> None:
    """AReaL's own shape and type: [tokens - 1, layers · top k], int32."""
    sample = Group.start(0, Prompt((2, 3)), 1, SamplingParams(9), 0).samples[0]
    rows = [np.full((5, 2, 2), version, np.uint8) + np.arange(5, dtype=np.uint8)[:, None, None] for version in (0, 10)]
    sample.extend([5, 6], [-1.0] * 2, 0)
    sample.route(RouteRows(0, rows[0][:3]), 0, False)
    sample.extend([7, 8], [-1.0] * 2, 1)
    sample.route(RouteRows(0, rows[1]), 1, False)
    drawn = replace(turn([2, 3], 5, 6, 7, 8), routes=sample.routes)
    made: Any = episode()

    async def respond(token_ids: Any, max_tokens: Any, stop: Any) -> Any:
        return drawn

    made.respond = respond
    request = ModelRequest(input_ids=[2, 3], gconfig=GenerationHyperparameters(max_new_tokens=4))
    shape = ServerRoutes((1, 2), 3, 2, 64)
    answer = asyncio.run(EpisodeEngine(made, lambda _: None, lambda: 1, shape).agenerate(request))
    assert answer.output_tokens == [5, 6, 7, 8]
    routed = answer.routed_experts
    assert (routed.dtype, routed.shape) == (np.int32, (5, 6))
    assert routed.tolist() == [[0, 0] + [value] * 4 for value in (0, 1, 2, 13, 14)]
    without = asyncio.run(EpisodeEngine(made, lambda _: None, lambda: 1).agenerate(request))
    assert without.routed_experts is None
