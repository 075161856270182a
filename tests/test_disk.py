"""State on disk that others gave a part of."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from april.disk import as_json


def test_values_of_numpy_and_torch_are_saved_as_pythons() -> None:
    state = {"a": np.float32(0.5), "b": [np.array([1, 2]), np.bool_(True)], "c": {"d": torch.tensor([0.25])}}
    assert json.loads(as_json(state)) == {"a": 0.5, "b": [[1, 2], True], "c": {"d": [0.25]}}


def test_values_that_json_lacks_are_named() -> None:
    with pytest.raises(TypeError, match="a set cannot be part of a checkpoint"):
        as_json({"kinds": {1, 2}})
