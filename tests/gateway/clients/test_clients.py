"""Programs of real clients end as they would with the APIs' own servers, also where a turn is held by training."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from april.rollout.episodes.turns import PromptTooLong
from tests.gateway.clients.cases import CASES, Case
from tests.gateway.scripted import ScriptedPolicy, served

pytest.importorskip("agents", reason="make test-clients has the packages")
pytest.importorskip("litellm", reason="make test-clients has the packages")


@pytest.fixture(scope="module")
def results():
    """What ended well, written where the table of the guide is made from."""
    found: dict[str, dict[str, bool]] = {}
    yield found
    if path := os.environ.get("APRIL_CLIENTS"):
        Path(path).write_text(json.dumps(found, indent=2) + "\n")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("held", [False, True], ids=["", "held"])
async def test_a_program_ends(case: Case, held: bool, results):
    by_case = results.setdefault(case.client, {})
    name = "held by training" if held else case.situation
    by_case[name] = by_case.get(name, True)
    policy = ScriptedPolicy(list(case.script))
    try:
        async with served(policy, keep_alive=0.05) as (_, access):
            training = asyncio.create_task(_train(policy)) if held else None
            try:
                ended = await asyncio.wait_for(case.play(access), 60)
            finally:
                if training is not None:
                    training.cancel()
        assert case.ends in str(ended)
        assert len(policy.requests) == len(policy.histories) == len(case.script)
    except BaseException:
        by_case[name] = False
        raise


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
async def test_a_client_recognises_a_conversation_that_is_too_long(provider: str, monkeypatch):
    import litellm

    async def refuse(*_):
        raise PromptTooLong(12, 9)

    policy = ScriptedPolicy([])
    monkeypatch.setattr(policy, "reply", refuse)
    async with served(policy) as (_, access):
        base = access.address if provider == "anthropic" else f"{access.address}/v1"
        asked = {"model": f"{provider}/policy", "api_base": base, "api_key": access.secret, "max_retries": 0}
        with pytest.raises(litellm.ContextWindowExceededError):
            await litellm.acompletion(**asked, messages=[{"role": "user", "content": "x"}])


async def _train(policy: ScriptedPolicy) -> None:
    """Hold every turn for a while, as an update of the weights does."""
    while True:
        policy.open.clear()
        await asyncio.sleep(0.3)
        policy.open.set()
        await asyncio.sleep(0.02)
