"""`import april` is light: the standard library and NumPy. The layers themselves are a contract (`make lint`)."""

from __future__ import annotations

import json
import subprocess
import sys


def test_importing_april_imports_only_numpy() -> None:
    script = "import json, sys; import april; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    imported = {name for name in json.loads(found) if not name.startswith("_")} - set(sys.stdlib_module_names)
    assert imported == {"april", "numpy"}
