"""Programs that play `examples/gcd_tool` through the gateway, as their users write them."""

from __future__ import annotations

import json
import random
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


async def with_stop(record: Mapping[str, Any], access: Any) -> Any:
    """Two turns of text, each up to a stop string."""
    import openai

    async with openai.AsyncOpenAI(base_url=f"{access.address}/v1", api_key=access.secret, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": record["prompt"]}]
        ends = []
        for _ in range(2):
            answer = await client.chat.completions.create(model=access.model, messages=messages, stop=["l_c", ">"])
            message = answer.choices[0].message
            assert ">" not in message.content
            assert "l_c" not in message.content
            ends.append(answer.choices[0].finish_reason)
            messages += [message, {"role": "user", "content": "Go on."}]
    return {"reward": 0.5, "stopped": float(ends.count("stop"))}


async def with_temperatures(record: Mapping[str, Any], access: Any) -> Any:
    """Three turns, each at a temperature of its own."""
    import openai

    async with openai.AsyncOpenAI(base_url=f"{access.address}/v1", api_key=access.secret, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": record["prompt"]}]
        for more in ({"temperature": 0.4}, {"temperature": 1.8}, {}):
            answer = await client.chat.completions.create(
                model=access.model, messages=messages, max_completion_tokens=12, **more
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "Go on."}]
    return random.random()  # rewards that differ: only then is anything trained


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


def subtract_numbers(a: int, b: int) -> int:
    """Subtract a number from another."""
    return a - b


async def with_openai_agents(record: Mapping[str, Any], access: Any) -> Any:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{access.address}/v1", api_key=access.secret, max_retries=0)
    model = agents.OpenAIResponsesModel(model=access.model, openai_client=client)
    tool = agents.function_tool(subtract_numbers, name_override="subtract")
    agent = agents.Agent(name="adder", instructions="Give the GCD.", tools=[tool], model=model)
    async with client:
        running = agents.Runner.run_streamed(agent, record["prompt"], max_turns=MOST_TURNS)
        async for _ in running.stream_events():
            pass
    return rewarded(record, str(running.final_output))


async def with_pydantic_ai(record: Mapping[str, Any], access: Any) -> Any:
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{access.address}/v1", api_key=access.secret)
    agent = pydantic_ai.Agent(OpenAIChatModel(access.model, provider=provider), instructions="Give the GCD.", retries=9)
    agent.tool_plain(name="subtract")(subtract_numbers)
    return rewarded(record, (await agent.run(record["prompt"])).output)


async def with_langgraph(record: Mapping[str, Any], access: Any) -> Any:
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model=access.model, base_url=f"{access.address}/v1", api_key=access.secret, max_retries=0)
    tool = StructuredTool.from_function(subtract_numbers, name="subtract")
    agent = create_react_agent(model, [tool], prompt="Give the GCD.")
    asked = {"messages": [("user", record["prompt"])]}
    ended = await agent.ainvoke(asked, {"recursion_limit": 2 * MOST_TURNS})
    return rewarded(record, ended["messages"][-1].content)


def score(record: Mapping[str, Any], conversations: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Reward an episode by its whole conversation."""
    (messages,) = conversations
    assert messages[-1]["role"] == "assistant"
    return {**rewarded(record, messages[-1]["content"]), "messages": len(messages)}
