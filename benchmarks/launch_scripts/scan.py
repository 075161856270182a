"""Counts which launch scripts of a framework april takes: reads the example scripts of a checkout, adds the lines that
april's page asks for, and applies april's rules to the settings. Nothing is run or trained.

In the framework's environment, its own configuration classes fill in defaults and refuse what they do not know;
elsewhere only the settings that a script gives are read.

    python -m benchmarks.launch_scripts.scan verl ~/verl
    .frameworks/verl/bin/python -m benchmarks.launch_scripts.scan verl ~/verl --json verl.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.launch_scripts.launch_settings import FORMATS, Launch, launches

from april.integrations.rules.catalogue import FRAMEWORKS
from april.integrations.rules.rule import Verdict, broken

FOLDERS = ("examples", "scripts", "recipe")
"""Folders of a checkout with launch scripts."""


@dataclass(frozen=True)
class Finding:
    """april's verdict on a training run of a script.

    Args:
        refused: reason by setting, for the settings that april refuses.
        ignored: reason by setting, for the settings that have no effect.
        invalid: why the framework itself does not accept the script, or an empty text.
    """

    script: str
    refused: dict[str, str]
    ignored: dict[str, str]
    invalid: str = ""

    @property
    def verdict(self) -> str:
        return "invalid" if self.invalid else "refused" if self.refused else "not refused"


def judge(framework: str, launch: Launch, name: str) -> Finding:
    """Apply the rules of a framework to a run."""
    try:
        value_of = FORMATS[framework].settings(launch)
    except ValueError as error:
        return Finding(name, {}, {}, str(error))
    found = list(broken(FRAMEWORKS[framework].rules, value_of))

    def reasons(verdict: Verdict) -> dict[str, str]:
        return {rule.setting: f"{value}: {rule.reason}" for rule, value in found if rule.verdict is verdict}

    return Finding(name, reasons(Verdict.REFUSED), reasons(Verdict.IGNORED))


def scan(framework: str, checkout: Path) -> list[Finding]:
    """Judge the training runs of all launch scripts in a checkout.

    Raises:
        ValueError: the checkout has no launch scripts.
    """
    scripts = [
        path
        for folder in FOLDERS
        for path in sorted((checkout / folder).rglob("*"))
        if path.suffix in (".sh", ".yaml", ".yml")
    ]
    found = [
        judge(framework, launch, str(script.relative_to(checkout)))
        for script in scripts
        for launch in launches(FORMATS[framework], script)
    ]
    if not found:
        raise ValueError(f"{checkout}: no launch scripts of {framework} in {', '.join(FOLDERS)}: give a checkout of it")
    return found


def summary(framework: str, found: Sequence[Finding]) -> str:
    """Return the counts of verdicts, and of each setting that is refused or ignored."""
    counts = Counter(finding.verdict for finding in found)
    valid = len(found) - counts["invalid"]
    lines = [
        f"{framework}: {counts['not refused']} of {valid} runs are not refused; the framework itself does not accept "
        f"{counts['invalid']}"
    ]
    for verdict in ("refused", "ignored"):
        names = [getattr(finding, verdict) for finding in found]
        alone = Counter(next(iter(given)) for given in names if len(given) == 1)
        for setting, count in Counter(setting for given in names for setting in given).most_common():
            lines.append(f"  {verdict} {setting}: {count}, {alone[setting]} for it alone")
    unchecked = [rule.setting for rule in FRAMEWORKS[framework].rules if rule.verdict and rule.holds is None]
    if unchecked:
        lines.append(f"  needs more than the settings, and is not checked here: {', '.join(unchecked)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FORMATS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict on each run")
    given = parser.parse_args()
    if not given.checkout.is_dir():
        parser.error(f"{given.checkout}: no such folder")
    try:
        found = scan(given.framework, given.checkout)
    except ValueError as error:
        parser.error(str(error))
    for finding in found:
        reasons = finding.invalid or "; ".join(f"{name} = {why}" for name, why in finding.refused.items())
        print(f"{finding.script}: {finding.verdict}{': ' if reasons else ''}{reasons}")
    whole = FORMATS[given.framework].whole
    print(f"defaults of {given.framework}: {'read' if whole else 'not read, run this in its environment'}")
    print(summary(given.framework, found))
    if given.json:
        runs = [{"verdict": finding.verdict, **asdict(finding)} for finding in found]
        given.json.write_text(json.dumps({"framework": given.framework, "defaults": whole, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
