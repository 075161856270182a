"""Programs that play `examples/gcd_tool` through the gateway, as their users write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
MOST_TURNS = 40


def rewarded(record: Mapping[str, Any], said: str | None) -> dict[str, Any]:
    return {"reward": float(f"<answer>{record['answer']}</answer>" in (said or "")), "said": said or ""}


def subtract(a: Any, b: Any) -> str:
    return str(int(a) - int(b))


async def with_openai(record: Mapping[str, Any], access: Any) -> Any:
    import openai

    async with openai.AsyncOpenAI(base_url=f"{access.address}/v1", api_key=access.secret, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": record["prompt"]}]
        for _ in range(MOST_TURNS):
            answer = await client.chat.completions.create(model=access.model, messages=messages, tools=[TOOL])
            message = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                result = subtract(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                return rewarded(record, message.content)
    return 0.0


async def with_anthropic(record: Mapping[str, Any], access: Any) -> Any:
    import anthropic

    tool = {**TOOL["function"], "input_schema": TOOL["function"]["parameters"]}
    tool.pop("parameters")
    async with anthropic.AsyncAnthropic(base_url=access.address, api_key=access.secret, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": record["prompt"]}]
        for _ in range(MOST_TURNS):
            async with client.messages.stream(
                model=access.model, max_tokens=1000, messages=messages, tools=[tool]
            ) as stream:
                message = await stream.get_final_message()
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": subtract(**block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            if not results:
                return rewarded(record, "".join(block.text for block in message.content))
            messages.append({"role": "user", "content": results})
    return 0.0
