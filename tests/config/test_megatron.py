"""What the backend on Megatron does not do is refused by name, and so is an environment without Megatron."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from april.commands.start import check_ranks
from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.recipe import Recipe


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("trainer", "policy_replicas", 2),
        ("trainer", "context_parallel", 2),
        ("trainer", "expert_parallel", 2),
        ("trainer", "cpu_offload", True),
        ("lora", "rank", 4),
        ("algorithm", "algorithm", "ppo"),
        ("rollout", "top_k", 20),
        ("rollout", "top_p", 0.9),
        ("rollout", "min_p", 0.1),
    ],
)
def test_unsupported_settings_are_refused(section: str, name: str, value: Any) -> None:
    recipe = Recipe()
    recipe.trainer.backend, recipe.trainer.processes = "megatron", 2
    setattr(getattr(recipe, section), name, value)
    with pytest.raises(ConfigError, match=rf'{section}\.{name} = .*backend = "megatron".*choose') as refused:
        check_recipe(recipe)
    assert '"fsdp2"' in str(refused.value)


def test_without_megatron_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr("april.training.megatron_package.version", nowhere)
    recipe = Recipe()
    recipe.trainer.backend = "megatron"
    with pytest.raises(ConfigError, match=r"needs megatron-core, which is not installed here: start april in an env"):
        check_ranks(recipe)
