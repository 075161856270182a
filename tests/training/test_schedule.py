from __future__ import annotations

import pytest

from april.config.settings import TrainingSettings
from april.training.schedule import share_of_peak


def test_the_learning_rate_warms_up_and_decays() -> None:
    settings = TrainingSettings(steps=12, warmup_steps=2)
    assert [share_of_peak(settings, n) for n in (1, 2, 3, 12)] == [0.5, 1, 1, 1]
    settings.lr_schedule = "linear"
    assert [share_of_peak(settings, n) for n in (2, 3, 8)] == [1, 1, 0.5]
    settings.lr_schedule = "cosine"
    assert share_of_peak(settings, 8) == pytest.approx(0.5)
