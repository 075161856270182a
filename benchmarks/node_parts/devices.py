"""The node: what `april doctor` finds, which GPU would do what, and which GPUs reach each other's memory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from node_parts.given import Given
from parts import Figures

from april.commands.doctor import findings
from april.engines.devices import assign


def measure(given: Given) -> Figures:
    found = list(findings(Path(given.server_python)))
    yield "doctor", [asdict(finding) for finding in found]
    seen = given.gpus()
    yield "gpus", [{"name": gpu.name, "bytes": gpu.total, "free_bytes": gpu.free} for gpu in seen]
    if given.device != "cpu":
        training = range(max(len(seen) // 2, 1))
        devices = assign(seen, training, len(seen) - len(training), 1)
        names = [f"{given.engine}-{i}" for i in range(len(devices.engines))]
        yield "half trains, half generates", [list(row) for row in devices.rows(names)]
        reach = [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(len(seen))] for i in range(len(seen))
        ]
        yield "peer_access", reach
    yield "failures", [f"{f.name}: {f.text}: {f.remedy}" for f in found if f.state == "fault"]
