"""The agent of this example: a program that uses OpenAI's client, as its user would write it for any model.

A commit broke the build. The policy runs the tests of commits by a tool, at most four times, and then names the first
commit that fails. The result of a test is the range that remains: the last commit known to be good and the
first known to be bad.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import openai

TESTS = 4
"""Tests of an episode. Halving twelve commits takes four at most."""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "run_tests",
        "description": "Run the tests of a commit.",
        "parameters": {
            "type": "object",
            "properties": {"commit": {"type": "integer", "description": "The commit's number."}},
            "required": ["commit"],
        },
    },
}
CERTIFICATES = httpx.create_ssl_context()
"""Read once: a client that reads them itself takes 20 ms, more than all requests of an episode."""


class Build:
    """A build that is good up to some commit.

    Args:
        good: a commit that passes.
        bad: a later commit that fails.
        first: the first commit that fails.
    """

    def __init__(self, good: int, bad: int, first: int) -> None:
        self.good, self.bad, self.first = good, bad, first

    def run_tests(self, commit: int) -> str:
        """Test a commit, and return the range that remains."""
        if commit >= self.first:
            self.bad = min(self.bad, commit)
        else:
            self.good = max(self.good, commit)
        return f"good {self.good} bad {self.bad}"


async def play(record: Mapping[str, Any], access: Any) -> dict[str, Any]:
    """Play an episode, and return its reward: 1 if the policy names the commit."""
    build = Build(int(record["good"]), int(record["bad"]), int(record["answer"]))
    messages: list[Any] = [{"role": "user", "content": record["prompt"]}]
    async with openai.AsyncOpenAI(
        base_url=f"{access.address}/v1",
        api_key=access.secret,
        http_client=openai.DefaultAsyncHttpxClient(verify=CERTIFICATES),
    ) as client:
        for tests in range(TESTS + 1):
            answer = await client.chat.completions.create(model=access.model, messages=messages, tools=[TOOL])
            message = answer.choices[0].message
            if not message.tool_calls:
                return {"reward": float(message.content == f"answer {build.first}"), "tests": tests}
            messages.append(message)
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answered(build, call)})
    return {"reward": 0.0, "tests": TESTS}


def answered(build: Build, call: Any) -> str:
    """The tool's answer to a call of the policy, which may be none that the tool knows."""
    try:
        return build.run_tests(int(json.loads(call.function.arguments)["commit"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error}"
