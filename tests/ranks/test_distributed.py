"""What ranks find wrong before they load a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Phi3Config

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.training.model_parallel import check_layout
from tests import tiny


def test_ranks_that_share_responses_divide_the_heads(tmp_path: Path) -> None:
    tiny.save(tmp_path)
    recipe = Recipe()
    recipe.model.path = str(tmp_path)
    for recipe.trainer.context_parallel in (1, 2):
        check_layout(recipe.trainer, recipe.model.path)
    recipe.trainer.context_parallel = 4
    with pytest.raises(ConfigError, match="context_parallel = 4 does not divide the 2 num_key_value_heads"):
        check_layout(recipe.trainer, recipe.model.path)


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        ("model", {"tensor_parallel": 4}, "tensor_parallel = 4 does not divide the 2 num_key_value_heads"),
        (
            "model",
            {"tensor_parallel": 2, "context_parallel": 2},
            "context_parallel · tensor_parallel = 4 does not divide the 2 num_key_value_heads",
        ),
        ("narrow", {"tensor_parallel": 2}, "tensor_parallel = 2 does not divide intermediate_size = 63"),
        ("model", {"expert_parallel": 2}, "is no mixture of experts"),
        ("mixture", {"expert_parallel": 3}, "expert_parallel = 3 does not divide the 4 experts"),
        ("mixture", {"tensor_parallel": 2}, "divided by expert_parallel alone: set it to a multiple of 2"),
        ("packed", {"tensor_parallel": 2}, "which april does not know"),
        ("mixture", {"backend": "megatron"}, "is a mixture of experts, which april has not trained by Megatron"),
    ],
)
def test_a_layout_that_does_not_divide_the_policy_is_refused(
    kind: str, settings: dict[str, object], problem: str, tmp_path: Path
) -> None:
    configurations = {
        "model": tiny.model().config,
        "narrow": tiny.model(intermediate_size=63).config,
        "mixture": tiny.mixture().config,
        "packed": Phi3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64),
    }
    configurations[kind].save_pretrained(tmp_path)
    recipe = Recipe()
    recipe.model.path = str(tmp_path)
    for name, value in settings.items():
        setattr(recipe.trainer, name, value)
    with pytest.raises(ConfigError, match=problem):
        check_layout(recipe.trainer, recipe.model.path)


def test_layouts_that_divide_the_policy_are_accepted(tmp_path: Path) -> None:
    tiny.mixture().config.save_pretrained(tmp_path)
    recipe = Recipe()
    recipe.model.path = str(tmp_path)
    for tensor, expert in ((1, 2), (1, 4), (2, 2), (2, 4)):
        recipe.trainer.tensor_parallel, recipe.trainer.expert_parallel = tensor, expert
        check_layout(recipe.trainer, recipe.model.path)
