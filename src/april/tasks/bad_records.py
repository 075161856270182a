"""The one policy for records and prompts that cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from april.tasks.task import BadRecords

logger = logging.getLogger(__name__)

EXAMPLES = 3


def settle(
    bad: Sequence[str], count: int, kind: str, policy: BadRecords, rule: str = 'task.on_bad_record = "skip"'
) -> None:
    """Raise for records or prompts that cannot be used, or log that they are left out.

    Args:
        bad: the reason for each, beginning with its file and line.
        count: records or prompts that were checked.
        kind: noun for them, in the plural.
        rule: setting by which they are left out.

    Raises:
        ValueError: `policy` is "raise", or nothing is left. The message is one line.
    """
    if not bad:
        return
    of_all = f"{len(bad)} of {count} {kind}" if count > 1 else ""
    if len(bad) == count:
        raise ValueError(f"{bad[0]} ({of_all} cannot be used)" if of_all else bad[0])
    if policy == "raise":
        raise ValueError(f"{bad[0]} ({of_all} cannot be used; {rule} leaves them out)")
    more = "; …" if len(bad) > EXAMPLES else ""
    logger.warning("%s are left out (%s): %s%s", of_all, rule, "; ".join(bad[:EXAMPLES]), more)
