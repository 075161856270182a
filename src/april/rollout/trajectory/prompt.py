"""A prompt: token ids, and the data that its reward needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from april.rollout.json_types import json_types


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with the data that its reward needs (answer, text, source) in `metadata`.

    `id` names the prompt in errors and reports; it need not be unique over epochs. Metadata must be JSON types: it is
    part of checkpoints.
    """

    token_ids: tuple[int, ...]
    id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    saved: str | None = field(default=None, repr=False, compare=False)
    """Metadata as JSON text, made by `sealed`."""

    def sealed(self) -> Prompt:
        """Return the prompt with its metadata serialised: later changes of the metadata by user code are not saved.

        Raises:
            ValueError: part of the metadata is not JSON types; the message names the prompt and the part.
        """
        return replace(self, saved=json.dumps(self._metadata()))

    def _metadata(self) -> Any:
        if self.saved is not None:
            return json.loads(self.saved)
        return json_types(dict(self.metadata), f"prompt {self.id!r}: metadata")

    def to_dict(self) -> dict[str, Any]:
        """Return the prompt as JSON types; `from_dict` restores it exactly.

        Raises:
            ValueError: see `sealed`.
        """
        return {"id": self.id, "token_ids": list(self.token_ids), "metadata": self._metadata()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Prompt:
        return cls(tuple(state["token_ids"]), state["id"], state["metadata"]).sealed()
