"""Settings of the output directory, the console and the trackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from april.config.ranges import (
    NotNegative,
)


@dataclass(kw_only=True)
class ReportingSettings:
    """Output directory, console and trackers.

    Args:
        output: Directory of the run: metrics, checkpoints, report.
        if_exists: Action if the directory has a run already: stop with an error, or rename the old run (DIR.1, DIR.2,
            …).
        trackers: Trackers that get the metrics, in addition to metrics.jsonl.
        prometheus_address: HOST:PORT of the metrics endpoint with the tracker prometheus. An address that other
            machines reach is readable by all of them.
        project: Project name in wandb and trackio, experiment in MLflow.
        show_completions: Number of completions per step and evaluation to print on the console.
    """

    output: str = "runs/april"
    if_exists: Literal["error", "rename"] = "error"
    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "prometheus"], ...] = ("tensorboard",)
    prometheus_address: str = "127.0.0.1:9464"
    project: str = "april"
    show_completions: NotNegative[int] = 0
