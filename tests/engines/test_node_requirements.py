"""The requirements of a run are checked on the node, and missing ones are reported with a remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from april.engines.ray.network_interface import interfaces
from april.engines.ray.node_requirements import NodeRequirements, marked


def test_a_node_that_meets_all_requirements_has_no_problem(tmp_path: Path) -> None:
    output = tmp_path / "runs" / "new"
    with marked(output) as marker:
        assert marker.parent == tmp_path
        assert NodeRequirements(str(tmp_path), output, marker).missing() == ""
        assert NodeRequirements("org/model").missing() == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (
            NodeRequirements("/no/model"),
            "model.path = '/no/model' is not there: put it on a file system that all nodes share",
        ),
        (NodeRequirements("org/model", version="0.0"), "the trainer's is 0.0: install the same"),
        (
            NodeRequirements("org/model", Path("/runs/a"), Path("/no/marker")),
            "reporting.output = '/runs/a' is not the same directory",
        ),
    ],
)
def test_missing_requirements_are_one_line(needs: NodeRequirements, said: str) -> None:
    assert said in needs.missing()
    assert "\n" not in needs.missing()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere gloo chooses")
def test_ranks_meet_on_the_interface_of_their_nodes_address() -> None:
    assert interfaces("127.0.0.3") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert interfaces("203.0.113.7") == {}
