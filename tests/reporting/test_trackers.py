"""Each tracker that is installed holds every step of a run once, crashes and resumes included. `make test-trackers` is
where wandb, trackio and MLflow are installed."""

from __future__ import annotations

import importlib
import socket
import sqlite3
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from april.reporting import tracker_feed
from april.reporting.run_log import RunLog
from april.reporting.trackers import TRACKERS
from tests.limits import HANG
from tests.reporting.test_completions import decode, step_of


def interrupted_run(directory: Path, tracker: str) -> None:
    """Steps 1 to 4, with two deaths: steps 3 and 4 are lost by the first, step 3 by the second, and done again."""
    with RunLog(directory, {"seed": 1}, [tracker], decode=decode) as log:
        log.step(step_of(2), {"loss": 0.25}, slots=2)
        log.step(step_of(3), {"loss": 0.5, "pass@1": 0.5}, slots=2)
        log.evaluation({"eval_reward": 0.75}, step_of(9).groups)
        state = log.state_dict()
        log.step(step_of(4), {"loss": 9.0}, slots=2)
        log.step(step_of(5), {"loss": 9.0}, slots=2)
    with RunLog(directory, {"seed": 1}, [tracker], resume=True, state=state, decode=decode) as log:
        log.step(step_of(4), {"loss": 8.0}, slots=2)
    with RunLog(directory, {"seed": 1}, [tracker], resume=True, state=state, decode=decode) as log:
        log.step(step_of(4), {"loss": 0.75}, slots=2)
        log.step(step_of(5), {"loss": 1.0}, slots=2)
        log.step(step_of(6), {"loss": 2.0}, slots=2)


def in_tensorboard(directory: Path) -> tuple[list[int], bool]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("optimisation/loss")]
    return steps, any(tag.startswith("completions/") for tag in events.Tags()["tensors"])


def in_wandb(directory: Path) -> tuple[None, bool]:
    """What wandb keeps offline of numbers, nothing in Python reads."""
    assert len(list(directory.glob("wandb/offline-run-*"))) >= 1
    return None, len(list(directory.rglob("*.table.json"))) >= 4


def in_trackio(directory: Path) -> tuple[list[int], bool]:
    with sqlite3.connect(directory.parent / "trackio" / "april.db") as database:
        rows = [(step, bytes(text)) for step, text in database.execute("select step, metrics from metrics order by id")]
    return [step for step, text in rows if b"optimisation/loss" in text], any(b"trackio.table" in t for _, t in rows)


def in_mlflow(directory: Path) -> tuple[list[int], bool]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{directory / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("april").experiment_id])
    steps = [value.step for value in client.get_metric_history(run.info.run_id, "optimisation/loss")]
    return steps, bool(client.list_artifacts(run.info.run_id, "completions"))


@pytest.mark.parametrize(
    ("tracker", "held"),
    [("tensorboard", in_tensorboard), ("wandb", in_wandb), ("trackio", in_trackio), ("mlflow", in_mlflow)],
)
def test_a_tracker_holds_each_step_once_and_the_text(
    tracker: str, held: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "tensorboard" if tracker == "tensorboard" else TRACKERS[tracker][1]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(tracker_feed, "END_SECONDS", 300.0)  # a run is resumed once the process before it has ended
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    interrupted_run(tmp_path / "run", tracker)
    steps, text = held(tmp_path / "run")
    assert steps in (None, [1, 2, 3, 4, 5])
    assert text


def test_prometheus_serves_the_latest_numbers_during_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    address = f"127.0.0.1:{free_port()}"
    recipe = {"reporting": {"prometheus_address": address}}
    with RunLog(tmp_path / "run", recipe, ["prometheus"]) as log:
        for step in (2, 3):
            log.step(step_of(step), {"loss": step / 4, "engines_ready": 2}, slots=2)
        lines = served(address, 'april_step{project="april",run="run"} 2.0')
        assert 'april_optimisation_loss{project="april",run="run"} 0.75' in lines
        assert 'april_engines_engines_ready{project="april",run="run"} 2.0' in lines
        assert 'april_step{project="april",run="run"} 2.0' in lines
        with RunLog(tmp_path / "other", recipe, ["prometheus"]) as other:
            other.step(step_of(2), {"loss": 1.0}, slots=2)
    assert f"reporting.prometheus_address = '{address}': " in caplog.text
    assert "name another port" in caplog.text
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
        probe.bind(("127.0.0.1", int(address.rpartition(":")[2])))  # it is free again


def served(address: str, line: str) -> list[str]:
    """Return the served lines once `line` is among them."""
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            lines: list[str] = answer.read().decode().splitlines()
            if line in lines:
                return lines
        time.sleep(0.02)
    raise AssertionError(f"{line} is not served")


def mlflow_of(directory: Path) -> Any:
    import mlflow

    return mlflow.MlflowClient(f"sqlite:///{directory / 'mlflow.db'}")


def test_mlflow_handles_a_moved_run_a_deleted_experiment_and_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = pytest.importorskip("mlflow.tracking._tracking_service.utils")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracker_feed, "END_SECONDS", 300.0)
    before, now = tmp_path / "before", tmp_path / "now"
    with RunLog(before, {"seed": 1}, ["mlflow"], decode=decode) as log:
        log.step(step_of(2), {"pass@1": 0.5}, slots=2)
        state = log.state_dict()
    before.rename(now)
    utils._artifact_repos_cache.clear()  # of this process: a run is resumed in another
    with RunLog(now, {"seed": 1}, ["mlflow"], resume=True, state=state, decode=decode) as log:
        log.step(step_of(3), {"pass@1": 0.75}, slots=2)
        state = log.state_dict()
    client = mlflow_of(now)
    experiment = client.get_experiment_by_name("april")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED"
    assert [value.value for value in client.get_metric_history(run.info.run_id, "rollout/pass_1")] == [0.5, 0.75]
    assert not before.exists()
    assert len(client.list_artifacts(run.info.run_id, "completions")) == 2
    client.delete_experiment(experiment.experiment_id)
    failing = RunLog(now, {}, ["mlflow"], resume=True, state=state, decode=decode)
    failing.step(step_of(4), {"pass@1": 1.0}, slots=2)
    with pytest.raises(RuntimeError), failing:
        raise RuntimeError
    (run,) = client.search_runs([client.get_experiment_by_name("april-2").experiment_id])
    assert run.info.status == "FAILED"
    assert [value.value for value in client.get_metric_history(run.info.run_id, "rollout/pass_1")] == [0.5, 0.75, 1.0]


def test_runs_with_equal_names_are_separate_in_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for folder in ("one", "two"):
        with RunLog(tmp_path / folder / "run", {}, ["trackio"], "apart") as log:
            log.step(step_of(2), {"loss": 1.0}, slots=2)
    with sqlite3.connect(trackio.TRACKIO_DIR / "apart.db") as database:
        names = [name for (name,) in database.execute("select distinct run_name from metrics")]
    assert len(names) == 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
