"""Everything of april that needs a GPU, on one CUDA or ROCm device, in one call of ten minutes.

From a checkout, in an environment with a GPU build of torch and `pip install -e ".[train,trl,dev]"`, or with april on
PYTHONPATH only:

    python benchmarks/gpu.py                          # all parts; each figure goes to benchmarks/gpu.json at once
    python benchmarks/gpu.py                          # again: only the parts that are not done
    python benchmarks/gpu.py --again --parts partial  # a part that is done, once more
    python benchmarks/gpu.py --device cpu --tiny      # the same code on small shapes, into build/gpu_tiny.json

Each part runs in its own process with its own limit (`parts.py`). The limits add up to less than ten minutes, without
the limits of the last two parts, which may need a second call. Pass counts suppose 20 ms a decode pass of Qwen3-0.6B's
shape. Weights are random (nothing is fetched), and lengths of responses are set, so that every arm generates the same
number of tokens.
The docstring of a file in `gpu_parts/` describes the part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts import ROOT, Part, Results, needs, run_all, run_here, slowed

PARTS = {
    "tests": Part("gpu_parts.tests", 75),
    "exactness": Part("gpu_parts.exactness", 45),
    "precision": Part("gpu_parts.precision", 35),
    "kernels": Part("gpu_parts.kernels", 35),
    "launches": Part("gpu_parts.launches", 30),
    "engine": Part("gpu_parts.engine", 65),
    "partial": Part("gpu_parts.partial", 65),
    "training": Part("gpu_parts.training", 50, needs("trl")),
    "memory": Part("gpu_parts.memory", 30),
    "roofline": Part("gpu_parts.roofline", 45),
    "nccl": Part("gpu_parts.nccl", 20),
    "train": Part("gpu_parts.train", 95),
    "shared": Part("gpu_parts.shared", 120),
    "vllm": Part("gpu_parts.vllm", 240, needs("vllm")),
}
SECONDS = 595
"""Of a call; what does not fit is left for the next one."""


def device_facts(device: str) -> dict[str, Any]:
    """The device, for the results file."""
    if device == "cpu":
        return {"name": "cpu"}
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU: install its CUDA or ROCm build, or try the script by --device cpu --tiny")
    facts = torch.cuda.get_device_properties(0)
    return {"name": facts.name, "memory": facts.total_memory, "cuda": torch.version.cuda, "hip": torch.version.hip}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--again", action="store_true", help="run parts that are done, too")
    parser.add_argument("--device", default="cuda", help="cuda (ROCm too) or cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of this call")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of all limits, for a slow machine")
    parser.add_argument("--output", type=Path, help="the results file")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.part:
        sys.path.append(str(ROOT / "src"))  # after april as it is installed
        from gpu_parts.bench import Bench

        run_here(PARTS[options.part], Bench(options.device, options.tiny), options.figures)
        return 0
    same = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    about = {"device": device_facts(options.device), "tiny": options.tiny}
    path = options.output or (ROOT / "build" / "gpu_tiny.json" if options.tiny else Path(__file__).with_suffix(".json"))
    command = [sys.executable, __file__, *same, "--part"]
    results, seconds = Results(path, about), options.seconds * options.slower
    parts = slowed(PARTS, options.slower)
    return run_all(parts, options.parts, lambda name: [*command, name], results, seconds, options.again)


if __name__ == "__main__":
    sys.exit(main())
