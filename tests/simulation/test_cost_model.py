from __future__ import annotations

import json
from pathlib import Path

import pytest

from april.simulation.cost_model import CostModel, CostModelError

COST = CostModel(
    slots=8,
    kv_tokens=1000,
    decode_batches=(1, 4),
    decode_seconds=(0.01, 0.016),
    kv_token_seconds=1e-6,
    errors={"x": 0.1},
)


def test_a_decode_step_is_linear_between_measured_batches_and_beyond() -> None:
    assert COST.base().tolist() == pytest.approx([0.0, 0.01, 0.012, 0.014, 0.016, 0.018, 0.02, 0.022, 0.024])


def test_the_ceiling_is_a_full_step() -> None:
    assert COST.ceiling(100) == pytest.approx(8 / (0.024 + 8 * 100 * 1e-6))
    assert COST.ceiling(500) == pytest.approx(2 / (0.012 + 2 * 500 * 1e-6)), "only two samples of that size fit"


def test_a_cost_model_survives_its_file(tmp_path: Path) -> None:
    COST.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == COST


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "slots = 0"),
        ({"speed": 1}, "unknown field speed"),
        ({"decode_seconds": [0.1]}, "decode_seconds"),
        ({"decode_batches": [4, 1]}, "decode_batches"),
        ({"kv_token_seconds": -1.0}, "kv_token_seconds"),
        ({"slots": "many"}, "no cost model: slots = 'many'"),
        ({"slots": 8.5}, "slots = 8.5"),
        ({"kv_tokens": 1e5}, "kv_tokens = 100000.0"),
        ({"decode_batches": [0, 4]}, "decode_batches"),
        ({"decode_seconds": [0.1, None]}, "decode_seconds"),
        ({"decode_seconds": [0.1, float("inf")]}, "decode_seconds"),
        ({"update_seconds": "1"}, "update_seconds = '1'"),
        ({"update_seconds": float("nan")}, "update_seconds = nan"),
        ({"prefix_caching": "no"}, "prefix_caching = 'no'"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({**json.loads(COST.to_json()), **change}))
    with pytest.raises(CostModelError, match=message) as error:
        CostModel.load(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match="cannot read"):
        CostModel.load(tmp_path / "none.json")
