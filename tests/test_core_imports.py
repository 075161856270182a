"""The core depends on the standard library and NumPy only; nothing else may creep in."""

from __future__ import annotations

import subprocess
import sys

CORE = (
    *("trajectory", "outbox", "engine", "staleness", "buffer", "reward", "step", "retries", "order", "journal"),
    *("rollout_state", "scheduler", "admission", "auto_admission", "forecast", "length_model", "rates", "disk"),
)


def test_importing_april_imports_nothing_but_numpy() -> None:
    script = (
        "import sys; import april;print(sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    imported = {name for name in eval(found) if not name.startswith("_")}
    assert imported == {"april", "numpy"}
    script = "import sys; import april; print([m for m in sys.modules if m.startswith('april.')])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert set(eval(found)) == {f"april.{name}" for name in CORE}
