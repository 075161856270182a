"""A prompt: token ids, its images, and the data that its reward needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from april.rollout.json_types import json_types
from april.rollout.trajectory.features import Feature, check_features, collapsed, features_from_json, features_to_json


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with the data that its reward needs (answer, text, source) in `metadata`.

    `id` names the prompt in errors and reports; it need not be unique over epochs. Metadata must be JSON types: it is
    part of checkpoints. The placeholders of `features` are among the token ids.

    Raises:
        ValueError: features do not fit the token ids; see `features.check_features`.
    """

    token_ids: tuple[int, ...]
    id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    saved: str | None = field(default=None, repr=False, compare=False)
    """Metadata as JSON text, made by `sealed`."""
    features: tuple[Feature, ...] = ()

    def __post_init__(self) -> None:
        if self.features:
            check_features(self.token_ids, self.features)

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
        images = {"features": features_to_json(self.features)} if self.features else {}
        return {"id": self.id, "token_ids": list(self.token_ids), "metadata": self._metadata(), **images}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Prompt:
        features = features_from_json(state.get("features", ()))
        return cls(tuple(state["token_ids"]), state["id"], state["metadata"], features=features).sealed()

    @property
    def shown_ids(self) -> list[int]:
        """Token ids with one placeholder for each image, for display."""
        return collapsed(self.token_ids, self.features)
