"""A pytest plugin that runs TRL's `tests/test_grpo_trainer.py` with april's `GRPOTrainer` in the place of TRL's.

    make test-trl-suite TRL=PATH [ARGS="-k eval"]

PATH is a checkout of TRL, of the release that is installed. Nothing is fetched, and nothing is written to it. Tests
that april refuses are reported as expected failures, with its line; `differences.py` names them, and those that do not
run. APRIL_TRL_PLAIN=1 runs the same tests with TRL's trainer: what fails there, too, is no fault of april's.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(tempfile.mkdtemp(prefix="trl-suite-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
# Before transformers and datasets are imported, which read them once.
os.environ["HF_HOME"] = str(FOLDER / "home")
os.environ["HF_HUB_CACHE"] = str(FOLDER / "hub")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import datasets  # noqa: E402
import differences  # noqa: E402
import fixed_tokens  # noqa: E402
import tiny_hub  # noqa: E402
import trl  # noqa: E402

LOADER = tiny_hub.Loader({})
PLAIN = os.environ.get("APRIL_TRL_PLAIN") == "1"


def pytest_configure(config: pytest.Config) -> None:
    checkout = config.rootpath
    if not (checkout / "tests" / "test_grpo_trainer.py").is_file():
        raise pytest.UsageError(f"TRL={checkout}: it has no tests/test_grpo_trainer.py; pass a checkout of TRL")
    tiny_hub.make_models(FOLDER / "hub", checkout)
    LOADER.known = tiny_hub.data_sets(checkout)
    datasets.load_dataset = LOADER
    installed: Any = importlib.import_module("trl.import_utils")
    # TRL uses jmespath for tools under old versions of transformers only, and its tests require it under all.
    installed.is_jmespath_available = lambda: True
    installed.__getattr__ = _unknown_package
    if not PLAIN:
        from april.integrations.trl import GRPOTrainer

        trl.GRPOTrainer = GRPOTrainer
    os.chdir(FOLDER)  # tests without output_dir write to the working directory


def _unknown_package(name: str) -> Callable[[], bool]:
    """Tests of another release may check for packages that the installed release does not know."""
    if name.startswith("is_") and name.endswith("_available"):
        return lambda: False
    raise AttributeError(name)


def pytest_report_header(config: pytest.Config) -> str:
    version = (config.rootpath / "VERSION").read_text().strip()
    differs = "" if version == trl.__version__ else f", which is not the installed release, {trl.__version__}"
    return f"TRL's tests of {version}{differs}; trainer: {trl.GRPOTrainer.__module__}"


def _names(item: Any) -> tuple[str, str, str]:
    """The name of a test with its parameters and without them, and its class."""
    kind = item.cls.__name__ if item.cls else ""
    return f"{kind}::{item.name}", f"{kind}::{item.originalname}", kind


def _of(names: dict[str, str], item: Any) -> str | None:
    return next((names[name] for name in _names(item) if name in names), None)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if (reason := _of(differences.NOT_RUN, item)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    LOADER.rows = None if _names(item)[1] in differences.ALL_ROWS else differences.ROWS


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Iterator[None]:
    refusal = None if PLAIN else _of(differences.REFUSED, pyfuncitem)
    fixed = None if PLAIN else differences.FIXED.get(_names(pyfuncitem)[1])
    if fixed is not None:
        with fixed_tokens.fixed_tokens(*fixed, tiny_hub.token_of):
            return (yield)
    if refusal is None:
        return (yield)
    try:
        yield
    except Exception as error:  # pytest's own, where a test expects another error
        if refusal not in str(error):
            raise
        pytest.xfail(next(line for line in str(error).splitlines() if refusal in line))
    pytest.fail(f"april does not refuse it any more ({refusal}): remove it from differences.py")
