from __future__ import annotations

import pytest

from april.config.keep_advice import WORTHWHILE, keep_advice
from april.config.recipe import Recipe


def test_keep_is_advised_from_a_share_on() -> None:
    sentence = keep_advice(Recipe(), WORTHWHILE, "3 s of 60 s")
    assert sentence.startswith('prefill of resumed responses takes 5% of the engines\' time: engine.on_update = "keep"')
    assert "would save about 3 s of 60 s" in sentence
    assert keep_advice(Recipe(), WORTHWHILE - 0.001, "3 s of 60 s") == ""
    assert keep_advice(Recipe(), None, "3 s of 60 s") == ""


@pytest.mark.parametrize(
    ("engine", "on_update"), [("embedded", "keep"), ("embedded", "redraft"), ("vllm-inproc", "recompute")]
)
def test_keep_is_not_advised_where_nothing_changes_or_april_refuses_it(engine: str, on_update: str) -> None:
    recipe = Recipe()
    recipe.engine.engine, recipe.engine.on_update = engine, on_update
    assert keep_advice(recipe, 0.5, "3 s of 60 s") == ""
