"""Prompts with images in slime, with slime's router, on a real SGLang server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.integrations.slime.source import load_weights, need_slime

need_slime()

from april.integrations import slime as plugin  # noqa: E402
from april.integrations.slime.dataset_images import CACHE_SIZE  # noqa: E402
from tests import vision  # noqa: E402
from tests.integrations.slime.test_images import EXACT, G, N, arguments, logprobs  # noqa: E402
from tests.integrations.slime.vision_server import Policy  # noqa: E402
from tests.servers.slime_server import start_sglang, use_router  # noqa: E402


async def test_samples_with_images_are_exact_over_updates_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token has the log-probability of its version's policy, with the images that slime's trainer gets."""
    monkeypatch.setenv("SLIME_HOST_IP", "127.0.0.1")
    folders = [
        vision.save_for_servers(tmp_path / f"policy-{seed}", "Qwen3VL", seed, draws_media=False) for seed in range(3)
    ]
    policies = [Policy(folder) for folder in folders]
    args = arguments(folders[0], tmp_path, length=60)
    held: dict[int, int] = {}
    """The policy of each version."""
    resumed = 0
    async with start_sglang(folders[0], tmp_path, context=256, tokens=8192, environment={CACHE_SIZE: "0"}) as server:
        use_router(args, server)
        source = plugin.DataSource(args)
        for rollout_id in range(5):
            following = min(rollout_id, 2)
            load_weights(server.url, folders[following], rollout_id + 1)
            if rollout_id == 2:
                source.save(1)
                source = plugin.DataSource(args)
                source.load(1)
            groups = plugin.rollout(args, rollout_id, source).samples
            rollouts = source.rollouts
            assert rollouts is not None
            held[rollouts._adapter.version] = following  # type: ignore[union-attr]
            assert [len(group) for group in groups] == [G] * N
            for group, ours in zip(groups, rollouts._batch.groups, strict=True):  # type: ignore[union-attr]
                for sample, own in zip(group, ours.samples, strict=True):
                    found = np.stack([logprobs(policy, sample) for policy in policies])
                    expected = found[[held[int(number)] for number in own.versions], range(sample.response_length)]
                    assert np.abs(expected - np.array(sample.rollout_log_probs)).max() < EXACT
                    resumed += bool(ours.prompt.features) and len(set(own.versions.tolist())) > 1
    assert resumed, "a sample with images has tokens of several versions"
