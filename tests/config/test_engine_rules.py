"""Engine settings from Python are checked like the settings of a recipe."""

from __future__ import annotations

import pytest

from april.config.engine_rules import check_engine
from april.config.error import ConfigError
from april.config.settings.engine_settings import EngineSettings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "sglang", "server_args": ("--speculative-algorithm", "NGRAM")}, "SGLang is not known to draw"),
    ],
)
def test_unsupported_speculation_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine(EngineSettings(**settings))  # type: ignore[arg-type]
