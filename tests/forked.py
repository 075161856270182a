"""`python -m april ARGUMENTS` in a process of its own, forked from a process that has imported torch and transformers.

A new interpreter spends 5 to 10 seconds on these imports, longer than most commands take. `start` returns a running
process with the part of `subprocess.Popen`'s interface that tests use; `run` waits for its end. The forked process has
its own environment, working directory, signal dispositions and pipes, so that signals and kills act as on a process
that a shell started.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import IO, Any

from tests.limits import HANG

PRELOAD = ("april.commands.main", "april.commands.train", "april.commands.resume", "tests.tiny")
ROOT = Path(__file__).parents[1]


class AprilProcess:
    """A running command.

    Args:
        pid: its process id.
        status: the pipe on which the server reports its exit status, as one number in text.
        stdout: the reading end of its standard output.
        stderr: the reading end of its standard error; None if both share a pipe.
    """

    def __init__(self, pid: int, status: IO[str], stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None
        self._status = status
        self._reaper = Thread(target=self._read_status, daemon=True)
        self._reaper.start()

    def _read_status(self) -> None:
        self.returncode = int(self._status.readline() or -signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status.

        Raises:
            TimeoutExpired: the process runs longer than `timeout` seconds.
        """
        self._reaper.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("april", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the process runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process without notice."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of standard output and standard error after the process has ended.

        Raises:
            TimeoutExpired: the process runs longer than `timeout` seconds.
        """
        texts = ["", ""]

        def read(index: int, pipe: IO[str]) -> None:
            texts[index] = pipe.read()

        readers = [
            Thread(target=read, args=(index, pipe), daemon=True)
            for index, pipe in enumerate((self.stdout, self.stderr))
            if pipe is not None and not pipe.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts[0], texts[1]


def start(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> AprilProcess:
    """Start `python -m april ARGUMENTS`.

    Args:
        arguments: the command line after `april`.
        cwd: its working directory; this process's by default.
        env: its whole environment; this process's by default.
        stdout: `subprocess.PIPE`, `subprocess.DEVNULL` or a file descriptor.
        stderr: as `stdout`, or `subprocess.STDOUT`.
    """
    pipes, passed = ExitStack(), list[int]()

    def end(choice: int) -> int | None:
        """Choose the descriptor that the command gets; return the reading end of a new pipe, if it is one."""
        if choice == subprocess.PIPE:
            reader, writer = os.pipe()
            pipes.callback(os.close, writer)
            passed.append(writer)
            return reader
        if choice == subprocess.DEVNULL:
            choice = os.open(os.devnull, os.O_WRONLY)
            pipes.callback(os.close, choice)
        passed.append(passed[0] if choice == subprocess.STDOUT else choice)
        return None

    with pipes:
        output, errors, status = end(stdout), end(stderr), end(subprocess.PIPE)
        request = {
            "arguments": [*map(str, arguments)],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        socket.send_fds(_server(os.getpid()), [json.dumps(request).encode()], passed)
    assert status is not None
    lines = open(status)  # noqa: SIM115
    pid = int(lines.readline())
    return AprilProcess(pid, lines, *(_reader(pipe) for pipe in (output, errors)))


def _reader(pipe: int | None) -> IO[str] | None:
    return None if pipe is None else open(pipe, errors="replace")


def run(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = HANG
) -> subprocess.CompletedProcess[str]:
    """Run `python -m april ARGUMENTS` to its end; a command that takes longer than `timeout` seconds is killed.

    Returns:
        what `subprocess.run` returns; the exit status of a killed command is -SIGKILL.
    """
    process = start(*arguments, cwd=cwd, env=env)
    killer = Thread(target=_kill_after, args=(process, timeout), daemon=True)
    killer.start()
    out, err = process.communicate()
    return subprocess.CompletedProcess(["april", *map(str, arguments)], process.wait(), out, err)


def wait_until(
    condition: Any, process: AprilProcess | subprocess.Popen[Any] | None = None, limit: float = HANG
) -> None:
    """Poll `condition` until it holds, for at most `limit` seconds and while `process` runs."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come to hold"
        assert process is None or process.poll() is None, f"the process ended with {process.communicate()}"
        time.sleep(0.02)


def _kill_after(process: AprilProcess, seconds: float) -> None:
    process._reaper.join(seconds)
    process.kill()


@functools.cache
def _server(pid: int) -> socket.socket:
    """Return the connection to the server of the process `pid`, this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
    server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
    theirs.close()
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


def _serve(requests: socket.socket) -> None:
    """Fork a process for each request until the other end is closed."""
    for name in PRELOAD:
        __import__(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the child processes, which have no waiting parent
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _fork_and_report(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_and_report(request: dict[str, Any], out: int, err: int, status: int) -> None:
    """Fork the command, and write its process id and then its exit status to `status`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _command(request, out, err)
    os.close(out)
    os.close(err)
    os.write(status, f"{pid}\n".encode())
    _, ended = os.waitpid(pid, 0)
    os.write(status, f"{os.waitstatus_to_exitcode(ended)}\n".encode())
    os._exit(0)


def _command(request: dict[str, Any], out: int, err: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, max(out, err) + 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["april", *request["arguments"]]
    sys.path[0] = request["cwd"]
    status: object = 0
    try:
        runpy.run_module("april", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    _exit(status)


def _exit(status: object) -> None:
    """End this forked process as a new interpreter ends: exit handlers, flushed output, the status of `sys.exit`."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            status = status or 120
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
