"""What ranks find wrong before they load a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.training.crew import check_heads
from tests import tiny


def test_ranks_that_share_responses_divide_the_heads(tmp_path: Path) -> None:
    tiny.save(tmp_path)
    recipe = Recipe()
    recipe.model.path = str(tmp_path)
    for recipe.trainer.context_parallel in (1, 2):
        check_heads(recipe)
    recipe.trainer.context_parallel = 4
    with pytest.raises(ConfigError, match="context_parallel = 4 does not divide the 2 num_key_value_heads"):
        check_heads(recipe)
