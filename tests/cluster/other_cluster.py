"""A cluster of one node in a process with its own environment. It prints its address and its dashboard's address, and
ends at the end of its standard input."""

from __future__ import annotations

import sys

from tests.cluster.raylets import Raylets

if __name__ == "__main__":
    raylets = Raylets(dashboard=True)
    raylets.add()
    print(raylets.address, raylets.dashboard, flush=True)
    sys.stdin.read()
    raylets.close()
