from __future__ import annotations

import pytest

from april.config.settings.training_settings import TrainingSettings
from april.training.lr_schedule import lr_factor


def test_the_learning_rate_warms_up_and_decays() -> None:
    settings = TrainingSettings(steps=12, warmup_steps=2)
    assert [lr_factor(settings, n) for n in (1, 2, 3, 12)] == [0.5, 1, 1, 1]
    settings.lr_schedule = "linear"
    assert [lr_factor(settings, n) for n in (2, 3, 8)] == [1, 1, 0.5]
    settings.lr_schedule = "cosine"
    assert lr_factor(settings, 8) == pytest.approx(0.5)
