"""What an integration puts into its framework's checkpoint.

Invariant: what is read back is of the format that this april writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def stamped(format: int, **state: Any) -> dict[str, Any]:
    """`state`, and which format it is of."""
    return {"format": format, **state}


def opened(saved: Mapping[str, Any], format: int, where: object) -> Mapping[str, Any]:
    """What `stamped` made.

    Raises:
        ValueError: another april made it; the message says `where`.
    """
    if saved.get("format") != format:
        raise ValueError(
            f"{where}: the rollouts were saved in format {saved.get('format')}, and this april reads {format}; resume "
            "with the april that saved them"
        )
    return saved
