"""Settings of an engine that come from Python are checked as those of a recipe are."""

from __future__ import annotations

import pytest

from april.config.checking import check_engine
from april.config.error import ConfigError
from april.config.settings.engine_settings import EngineSettings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "sglang", "server_args": ("--speculative-algorithm", "NGRAM")}, "SGLang is not known to draw"),
    ],
)
def test_speculation_that_an_engine_cannot_do_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine(EngineSettings(**settings))  # type: ignore[arg-type]
