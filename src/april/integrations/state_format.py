"""Format numbers of the state that an integration adds to its framework's checkpoint.

Invariant: state is only restored from the format that this april writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_format(format: int, **state: Any) -> dict[str, Any]:
    """Return `state` with its format number."""
    return {"format": format, **state}


def check_format(saved: Mapping[str, Any], format: int, where: object) -> Mapping[str, Any]:
    """Return state made by `with_format`.

    Args:
        where: the checkpoint or file that holds it, for the error message.

    Raises:
        ValueError: another april saved it, in another format.
    """
    if saved.get("format") != format:
        raise ValueError(
            f"{where}: the rollouts were saved in format {saved.get('format')}, and this april reads {format}; resume "
            "with the april that saved them"
        )
    return saved
