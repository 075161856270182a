"""The cause of a death, from what real servers logged."""

from __future__ import annotations

import pytest

from april.engines.servers.log_cause import cause, exit_of, last_line

VLLM_CACHE = """\
(APIServer pid=23280) WARNING 11-22 16:35:04 [system_utils.py:255] It causes errors like `OSError: [Errno 24] Too many
(EngineCore pid=23384) ERROR 11-22 16:36:14 [core.py:1510] EngineCore failed to start.
(EngineCore pid=23384) ERROR 11-22 16:36:14 [core.py:1510]     raise ValueError(
(EngineCore pid=23384) ERROR 11-22 16:36:14 [core.py:1510] ValueError: To serve at least one request with the model's \
max seq len (2048), (0.0 GiB KV cache is needed, which is larger than the available KV cache memory (0.0 GiB).
(EngineCore pid=23384) Process EngineCore:
(EngineCore pid=23384) Traceback (most recent call last):
    raise ValueError(
ValueError: To serve at least one request with the model's max seq len (2048), (0.0 GiB KV cache is needed, which is \
larger than the available KV cache memory (0.0 GiB).
(APIServer pid=23280) Traceback (most recent call last):
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""
VLLM_FLAG = """\
usage: api_server.py [-h] [--headless]
api_server.py: error: unrecognized arguments: --no-such-flag
"""
VLLM_SETTING = """\
pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (9999999) is greater than the derived max_model_len. [type=value_error]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
VLLM_FIELD = """\
pydantic_core.ValidationError: 1 validation error for CacheConfig
block_size
  Input should be a valid integer [type=int_parsing]
"""
SGLANG_MEMORY = """\
[2026-11-22 16:37:10] Scheduler hit an exception: Traceback (most recent call last):
  File "model_runner.py", line 1, in init_memory_pool
    raise RuntimeError(
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.

[2026-11-22 16:37:10] Received sigquit from a child process. It usually means the child failed.
"""
CUDA = (
    "(Worker_TP0 pid=7) ERROR 11-22 16:36:14 [worker.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB.\n"
)
CRASH = "all is well\n(EngineCore pid=3) Fatal Python error: Segmentation fault\n"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            VLLM_CACHE,
            "ValueError: To serve at least one request with the model's max seq len (2048), (0.0 GiB KV cache ",
        ),
        (VLLM_FLAG, "unrecognized arguments: --no-such-flag"),
        (
            VLLM_SETTING,
            "pydantic_core.ValidationError: 1 validation error for ModelConfig: Value error, User-specified "
            "max_model_len (9999999) is greater",
        ),
        (
            VLLM_FIELD,
            "pydantic_core.ValidationError: 1 validation error for CacheConfig: block_size: Input should",
        ),
        (SGLANG_MEMORY, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
        (CUDA + "vllm.v1.engine.exceptions.EngineDeadError: see stack trace\n", "torch.OutOfMemoryError: CUDA out of "),
        (CRASH, "Fatal Python error: Segmentation fault"),
        ("EngineDeadError: it died\n", "EngineDeadError: it died"),
    ],
)
def test_the_cause_is_the_last_exception_that_reports_no_other(log: str, expected: str) -> None:
    found = cause(log)
    assert found is not None
    assert found.startswith(expected)


def test_a_log_without_an_exception_has_no_cause() -> None:
    quiet = "INFO: 127.0.0.1 - GET /health 200\nconsider raising an Error: no\n\n"
    assert cause(quiet) is None
    assert last_line(quiet) == "consider raising an Error: no"
    assert last_line("\n") is None


def test_a_long_cause_is_cut() -> None:
    assert len(cause("ValueError: " + "x" * 5000) or "") == 300


def test_how_a_process_ended() -> None:
    assert exit_of(2) == "exit status 2"
    assert exit_of(-11) == "killed by SIGSEGV"
    assert exit_of(-9).startswith("killed by SIGKILL, by someone or")
