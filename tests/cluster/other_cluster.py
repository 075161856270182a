"""A cluster of one node in a process with an environment of its own: says its address and that of its dashboard, and
ends with its input."""

from __future__ import annotations

import sys

from tests.cluster.raylets import Raylets

if __name__ == "__main__":
    raylets = Raylets(dashboard=True)
    raylets.add()
    print(raylets.address, raylets.dashboard, flush=True)
    sys.stdin.read()
    raylets.close()
