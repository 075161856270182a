"""What the light base does and does not do, seen from an environment that holds the wheel and NumPy alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

HEAVY = {"torch", "transformers", "pydantic", "tyro", "rich", "aiohttp", "pyarrow"}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", *arguments], capture_output=True, text=True, timeout=300, check=False)


def expect(condition: bool, rule: str, found: object) -> None:
    if not condition:
        raise SystemExit(f"the wheel: {rule}\n{found}")


def main() -> None:
    installed = {found.metadata["Name"].lower() for found in metadata.distributions()} - {"pip", "setuptools"}
    expect(installed == {"april-rl", "numpy"}, "it brings NumPy and nothing else", installed)

    imported = python("-c", "import json, sys, april; print(json.dumps([april.__file__, sorted(sys.modules)]))")
    expect(imported.returncode == 0, "it can be imported", imported.stderr)
    file, modules = json.loads(imported.stdout)
    expect(Path(file).is_relative_to(sys.prefix), "what is imported is what was installed", file)
    expect(not HEAVY & set(modules), "importing it loads nothing heavy", HEAVY & set(modules))
    expect(Path(file).with_name("py.typed").is_file(), "its types are for others to check against", file)

    example = max(re.findall(r"```python\n(.*?)```", Path(sys.argv[1]).read_text(), re.DOTALL), key=len)
    ran = python("-c", example)
    expect(ran.returncode == 0 and len(ran.stdout.splitlines()) == 10, "the README's example runs", ran.stderr)

    april = str(Path(sys.executable).with_name("april"))
    version, train = (subprocess.run([april, argument], capture_output=True, text=True) for argument in ARGUMENTS)
    expect(version.stdout == f"april {metadata.version('april-rl')}\n", "it says its version", version)
    wanted = "april: april train needs"
    expect(train.returncode == 2 and train.stderr.startswith(wanted), "it names the extra that is missing", train)
    expect(train.stderr.count("\n") == 1 and "april-rl[train] @ file:" in train.stderr, "and how to get it", train)
    print(f"the wheel works with Python {sys.version.split()[0]}: {train.stderr.strip()}")


ARGUMENTS = ("--version", "train")

if __name__ == "__main__":
    main()
