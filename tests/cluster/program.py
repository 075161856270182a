"""A program that reports its process id and then executes commands from its standard input."""

from __future__ import annotations

import os
import sys
import time

from april.training.rank_protocol import StatusReporter


def main() -> int:
    report = StatusReporter()
    told = sys.stdin.read()
    report.report(pid=os.getpid(), rank=os.environ["RANK"])
    if told == "wait":
        time.sleep(3600)
    print("so it ends")
    return int(told)


if __name__ == "__main__":
    sys.exit(main())
