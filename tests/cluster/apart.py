"""A cluster of one node in a process with an environment of its own: says its address, and ends with its input."""

from __future__ import annotations

import sys

from tests.cluster.raylets import Raylets

if __name__ == "__main__":
    raylets = Raylets()
    raylets.add()
    print(raylets.address, flush=True)
    sys.stdin.read()
    raylets.close()
