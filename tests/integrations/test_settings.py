"""Shared parts of integrations: april's settings, refused settings of frameworks, and rows of dataloaders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from april.integrations.prompts import DataloaderRows
from april.integrations.settings import Settings
from april.integrations.trainer_ranks import JobLostError, is_job_loss
from april.rollout.params import MAX_STALENESS


def test_settings_are_text_or_numbers() -> None:
    assert Settings.read({}) == Settings(over_sampling_batch_size="auto", max_staleness=MAX_STALENESS)
    assert Settings.read({"over_sampling_batch_size": "12", "max_staleness": 3}) == Settings(
        over_sampling_batch_size=12, max_staleness=3
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"staleness": 1},
            r"^--april.staleness: april has no such setting, only --april.over_sampling_batch_size and",
        ),
        ({"max_staleness": "few"}, r"^--april.max_staleness = few: give a number, or auto$"),
        ({"over_sampling_batch_size": 3}, r"^--april.over_sampling_batch_size = 3 is less than --batch = 4: raise it"),
        ({"over_sampling_batch_size": "99"}, r"^--april.over_sampling_batch_size = 99 cannot keep --april.max_stalen"),
        ({"max_staleness": "auto"}, r"^--april.max_staleness = 'auto': give a number of weight updates"),
    ],
)
def test_settings_out_of_range_are_named_as_the_user_writes_them(given: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Settings.read(given, "--april.{}").params(4, 2, {"rollout_batch_size": "--batch"}, "--april.{}")
    assert "\n" not in str(caught.value)


class Batches:
    """Rows in batches of three, in another order each epoch, with its place in its state."""

    def __init__(self) -> None:
        self.sampler = self
        self.epoch = self.place = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[int]]:
        order = [(5 * i + self.epoch) % 6 for i in range(6)]
        while self.place < 2:
            self.place += 1
            yield order[3 * self.place - 3 : 3 * self.place]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("stop", range(14))
def test_rows_continue_at_the_saved_position(stop: int) -> None:
    rows = DataloaderRows(Batches())
    whole = [next(rows) for _ in range(18)]
    assert [sorted(whole[i : i + 6]) for i in (0, 6, 12)] == [list(range(6))] * 3
    assert whole[:6] != whole[6:12], "each epoch has its own order"
    first = DataloaderRows(Batches())
    before = [next(first) for _ in range(stop)]
    second = DataloaderRows(Batches())
    second.load_state_dict(first.state_dict())
    assert second.peek() == whole[stop]
    assert before + [next(second) for _ in range(18 - stop)] == whole


def test_a_dataloader_without_rows_ends() -> None:
    rows = DataloaderRows([[], []])
    with pytest.raises(StopIteration):
        next(rows)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (JobLostError(), True),
        (RuntimeError("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0"), False),
        (RuntimeError("Backend gloo does not support reduce_scatter"), False),
        (ValueError("connection closed by peer"), False),
    ],
)
def test_only_a_lost_connection_is_the_loss_of_a_process(error: Exception, lost: bool) -> None:
    assert is_job_loss(error) is lost
