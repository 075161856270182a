"""Run slime's `train.py` or `train_async.py` on a CPU: `python -m tests.integrations.slime.script PROGRAM FLAGS`.

What stands in: Megatron's parser (`stand_ins`) and its actor (`cpu_actor.py`), and the number of GPUs that Ray knows.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from pathlib import Path

from tests.integrations.restart import own_ray
from tests.integrations.slime.cpu_actor import CPUTrainActor

SETUP = "tests.integrations.slime.cpu_accelerator.register"
ACTOR = "slime.backends.megatron_utils.actor"

if __name__ == "__main__":
    stand_in = types.ModuleType(ACTOR)
    stand_in.MegatronTrainRayActor = CPUTrainActor  # type: ignore[attr-defined]
    sys.modules[ACTOR] = stand_in
    sys.argv = sys.argv[1:]
    with own_ray(Path(sys.argv[0]).parent, SETUP, PYTHONPATH=os.environ["PYTHONPATH"]):
        runpy.run_path(sys.argv[0], run_name="__main__")
