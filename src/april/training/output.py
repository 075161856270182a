"""The run's directory: never two runs in one, and never a finished one overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from april.config import ConfigError


def prepare_output(directory: Path, if_exists: Literal["error", "rename"]) -> None:
    """Make room for a new run in `directory`.

    Raises:
        ConfigError: a run is there already and `if_exists` is "error".
    """
    if not (directory / "metrics.jsonl").exists():
        return
    if if_exists == "error":
        raise ConfigError(
            f"reporting.output = {str(directory)!r}: there is a run already; go on with it by april train --resume "
            f"{directory}, choose another --output, or keep it under another name by --if-exists rename"
        )
    number = 1
    while (backup := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    directory.rename(backup)
