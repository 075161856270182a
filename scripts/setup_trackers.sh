#!/usr/bin/env bash
# A virtual environment with wandb, trackio and MLflow, to test april's trackers in: .frameworks/trackers by default.
#   scripts/setup_trackers.sh [DIR]
#   .frameworks/trackers/bin/python -m pytest tests/reporting/test_trackers.py
source "$(dirname "$0")/environment.sh"
environment "${1:-$root/.frameworks/trackers}" scripts/setup_trackers.sh pyproject.toml
# mlflow-skinny is MLflow's client; its store in a file needs SQLAlchemy and alembic besides. No torch: no tracker needs it.
$pip install --no-compile numpy pandas pyarrow pydantic rich tensorboardX \
  pytest pytest-asyncio hypothesis wandb==0.31.0 trackio==0.43.0 mlflow-skinny==3.17.2 SQLAlchemy==2.1.9 alembic==1.20.1 \
  prometheus_client==0.26.0
$pip install --no-deps --editable "$root"
"$env/bin/python" -W ignore -c "import april.reporting.trackers, mlflow, trackio, wandb"
ready
