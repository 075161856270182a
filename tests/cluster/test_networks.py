"""The network of a node is lost, and none of its processes: a real one, of namespaces of this test's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: scripts/setup_cluster.sh")

from tests.cluster.networks import ALONE

GENEROUS = 900.0


def test_a_node_that_loses_its_network_loses_no_token_and_recovers_with_the_current_weights() -> None:
    link = ["ip", "link", "add", "here", "type", "veth", "peer", "name", "there"]
    try:
        subprocess.run([*ALONE, *link], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine lets no user make namespaces with networks: {error}")
    command = [*ALONE, sys.executable, "-m", "tests.cluster.networks"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=GENEROUS)
    assert done.returncode == 0, done.stdout
