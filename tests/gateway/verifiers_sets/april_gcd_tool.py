"""A task set of several turns with a tool server. Its own harness calls the tool itself, in verifiers' process; others
may be chosen."""

from __future__ import annotations

import json
import math

import openai
import verifiers.v1 as vf

TOOL = {
    "type": "function",
    "function": {
        "name": "subtract",
        "description": "Subtract a number from another.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class Pair(vf.TaskData):
    a: int
    b: int


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def subtract(self, a: int, b: int) -> str:
        """Subtract a number from another."""
        return str(a - b)


class Gcd(vf.Task[Pair]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        said = trace.branches[-1].messages[-1].content or ""
        return float(f"<answer>{math.gcd(self.data.a, self.data.b)}</answer>" in said)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(sum(node.message.role == "tool" for node in trace.nodes))


class GcdTasks(vf.Taskset[Gcd]):
    def load(self):
        text = "Give the greatest common divisor of {a} and {b}."
        return [
            Gcd(Pair(a=a, b=b, prompt=text.format(a=a, b=b), system_prompt="Subtract with the tool."))
            for a in range(2, 17)
            for b in range(2, 17)
        ]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]


class Loop(vf.Harness[vf.HarnessConfig]):
    """Answers the policy's calls until a turn has none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
                message = answer.choices[0].message
                messages.append(message)
                for call in message.tool_calls or ():
                    numbers = json.loads(call.function.arguments)
                    result = str(int(numbers["a"]) - int(numbers["b"]))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["GcdTasks", "Loop"]


if __name__ == "__main__":
    Calculator.run()
