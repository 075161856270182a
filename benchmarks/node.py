"""april on your own node: its GPUs, its servers, and your own training script, in 20 minutes, into one JSON.

From a checkout, in an environment with april, a GPU build of torch and `pip install -e ".[train,servers]"`:

    python benchmarks/node.py --server-python /envs/vllm/bin/python
    python benchmarks/node.py --server-python /envs/vllm/bin/python --parts synchronous own-partial april \\
        --synchronous "python train.py" --own-partial "python train.py --partial" --april "python train_april.py" \\
        --metric "tokens/s: ([0-9.]+)"

The first command checks the node: devices, NCCL, CUDA IPC, what a server frees when it sleeps, log-probabilities of
servers against the trainer's, and a server that is killed in the middle of an update. The second command runs your
own TRL, verl or slime script three ways, each for three minutes at most. Figures go to `node.json`, which can be sent
with a report: secrets of the environment are left out. Weights are random; nothing is fetched. A second call continues
with the parts that are not done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu import device_facts
from parts import ROOT, Part, Results, run_all, run_here, slowed

SCRIPTS = {"synchronous": "synchronous", "own-partial": "own_partial", "april": "with_april"}
NAMES = ["devices", "nccl", "ipc", "sleep", "kill", *SCRIPTS]
MARGIN = 30
"""Seconds of a part in addition to the limit of the user's command."""
SECONDS = 1200


def parts_of(options: argparse.Namespace) -> dict[str, Part]:
    """The parts, with their missing requirements."""
    command = lambda name: options.__dict__[name.replace("-", "_")]  # noqa: E731

    def no_command(name: str) -> Callable[[], str | None]:
        return lambda: None if command(name) else f"no command: name yours with --{name}"

    def gpus(count: int) -> Callable[[], str | None]:
        def missing() -> str | None:
            if options.device == "cpu":
                return None
            import torch

            seen = torch.cuda.device_count()
            return None if seen >= count else f"{seen} GPU(s), and {count} are needed"

        return missing

    def servers(count: int) -> Callable[[], str | None]:
        return lambda: gpus(1 + count)() if options.server_python else "no servers: name --server-python"

    fixed = {
        "devices": Part("node_parts.devices", 40),
        "nccl": Part("node_parts.collective", 70, gpus(2)),
        "ipc": Part("node_parts.ipc", 40),
        "sleep": Part("node_parts.servers:slept", 200, servers(1)),
        "kill": Part("node_parts.servers:killed", 220, servers(2)),
    }
    limit = options.run_seconds + MARGIN
    return fixed | {n: Part(f"node_parts.scripts:{f}", limit, no_command(n)) for n, f in SCRIPTS.items()}


def facts(device: str) -> dict[str, Any]:
    """The node's devices, for the results file."""
    if device == "cpu":
        return {"name": "cpu"}
    import torch

    return device_facts(device) | {"count": torch.cuda.device_count()}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--again", action="store_true", help="run parts that are done, too")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm", help="kind of the servers")
    parser.add_argument("--server-python", default="", help="interpreter of the servers' environment")
    parser.add_argument("--server-arguments", default="", help="more options of the servers, in one string")
    for name in SCRIPTS:
        parser.add_argument(f"--{name}", default="", metavar="COMMAND", help=f"your own training script, {name}")
    parser.add_argument("--metric", default="", help="regular expression whose group is a number in their output")
    parser.add_argument("--run-seconds", type=float, default=180.0, help="of each of your commands, at most")
    parser.add_argument("--device", default="cuda", help="cuda (ROCm too) or cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of this call")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of all limits, for a slow machine")
    parser.add_argument("--output", type=Path, default=Path("node.json"), help="the results file")
    parser.add_argument("--part", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    own = list(sys.argv[1:] if given is None else given)
    options = parser.parse_args(own)
    parts = parts_of(options)
    if options.part:
        sys.path.append(str(ROOT / "src"))  # after april as it is installed
        from node_parts.given import Given

        run_here(
            parts[options.part],
            Given(
                device=options.device,
                tiny=options.tiny,
                engine=options.engine,
                server_python=options.server_python or sys.executable,
                server_arguments=options.server_arguments,
                commands={name: options.__dict__[name.replace("-", "_")] for name in SCRIPTS},
                metric=options.metric,
                run_seconds=options.run_seconds,
                slower=options.slower,
            ),
            options.figures,
        )
        return 0
    results = Results(
        options.output, {"devices": facts(options.device), "tiny": options.tiny, "engine": options.engine}
    )
    command = [sys.executable, __file__, *own, "--part"]
    parts, seconds = slowed(parts, options.slower), options.seconds * options.slower
    return run_all(parts, options.parts, lambda name: [*command, name], results, seconds, options.again)


if __name__ == "__main__":
    sys.exit(main())
