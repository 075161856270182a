"""What each client is tried with: a script of the policy's turns, and a program that uses the client as its users do.

The packages are imported in the programs: `make test-clients` sets up an environment that has them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from april.gateway.access import Access
from tests.gateway.scripted import call

Play = Callable[[Access], Awaitable[Any]]

ADD = call("add", '{"a": 1, "b": 2}')
TWO = ADD + "\n" + call("add", '{"a": 3, "b": 4}')
ASKED = "What is 1 + 2?"
OWN = "You are a calculator. Use the tools."


@dataclass(frozen=True)
class Case:
    """One client in one situation.

    Attributes:
        client: name of the client, and of the API that it uses.
        situation: what is tried.
        script: the policy's turns.
        play: returns what the program has at its end.
        ends: what that must contain.
    """

    client: str
    situation: str
    script: Sequence[str]
    play: Play
    ends: str

    def __str__(self) -> str:
        return f"{self.client}: {self.situation}"


CASES: list[Case] = []


def case(client: str, situation: str, script: Sequence[str], ends: str) -> Callable[[Callable[..., Any]], Any]:
    """Add a program to the cases. One that is not async runs in a thread."""

    def add(play: Callable[[Access], Any]) -> Callable[[Access], Any]:
        async def awaited(access: Access) -> Any:
            if inspect.iscoroutinefunction(play):
                return await play(access)
            return await asyncio.to_thread(play, access)

        CASES.append(Case(client, situation, script, awaited, ends))
        return play

    return add


def url(access: Access) -> str:
    return f"{access.address}/v1"


# openai-agents


def agents_model(access: Access, api: str) -> Any:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url(access), api_key=access.secret)
    kind = agents.OpenAIResponsesModel if api == "Responses" else agents.OpenAIChatCompletionsModel
    return kind(model=access.model, openai_client=client)


def agents_agent(access: Access, api: str, **more: Any) -> Any:
    import agents

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return agents.Agent(name="adder", instructions=OWN, tools=[add], model=agents_model(access, api), **more)


def of_openai_agents(api: str) -> None:
    client = f"openai-agents ({api})"

    @case(client, "tools", [TWO, "It is 3."], "It is 3.")
    async def tools(access: Access) -> str:
        import agents

        return (await agents.Runner.run(agents_agent(access, api), ASKED)).final_output

    @case(client, "two turns", ["Three.", "Seven."], "Seven.")
    async def two_turns(access: Access) -> str:
        import agents

        agent = agents_agent(access, api)
        first = await agents.Runner.run(agent, ASKED)
        more = [*first.to_input_list(), {"role": "user", "content": "And 3 + 4?"}]
        return (await agents.Runner.run(agent, more)).final_output

    @case(client, "stream", [TWO, "It is 3."], "It is 3.")
    async def stream(access: Access) -> str:
        import agents

        running = agents.Runner.run_streamed(agents_agent(access, api), ASKED)
        kinds = [event.type async for event in running.stream_events()]
        assert "raw_response_event" in kinds
        return running.final_output

    @case(client, "structured output", ['{"total": 3}'], "3")
    async def structured(access: Access) -> str:
        import agents
        from pydantic import BaseModel

        class Sum(BaseModel):
            total: int

        agent = agents.Agent(name="adder", model=agents_model(access, api), output_type=Sum)
        return str((await agents.Runner.run(agent, ASKED)).final_output.total)

    @case(client, "rewritten history", ["Three.", "Seven."], "Seven.")
    async def rewritten(access: Access) -> str:
        import agents

        agent = agents_agent(access, api)
        first = await agents.Runner.run(agent, ASKED)
        summary = f"So far: {first.final_output}"
        return (await agents.Runner.run(agent, [{"role": "user", "content": summary}])).final_output

    @case(client, "sub-agent", [call("helper", '{"input": "1 + 2"}'), "3", "It is 3."], "It is 3.")
    async def sub_agent(access: Access) -> str:
        import agents

        helper = agents.Agent(name="helper", instructions="You help.", model=agents_model(access, api))
        tool = helper.as_tool(tool_name="helper", tool_description="Helps.")
        agent = agents.Agent(name="a", instructions=OWN, tools=[tool], model=agents_model(access, api))
        return (await agents.Runner.run(agent, ASKED)).final_output


of_openai_agents("Responses")
of_openai_agents("chat")


# pydantic-ai


def pydantic_agent(access: Access, api: str, **more: Any) -> Any:
    import pydantic_ai
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if api == "Messages":
        provider: Any = AnthropicProvider(base_url=access.address, api_key=access.secret)
        model: Any = AnthropicModel(access.model, provider=provider)
    else:
        provider = OpenAIProvider(base_url=url(access), api_key=access.secret)
        model = (OpenAIResponsesModel if api == "Responses" else OpenAIChatModel)(access.model, provider=provider)
    agent = pydantic_ai.Agent(model, instructions=OWN, **more)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return agent


def of_pydantic_ai(api: str) -> None:
    client = f"pydantic-ai ({api})"

    @case(client, "tools", [TWO, "It is 3."], "It is 3.")
    async def tools(access: Access) -> str:
        return (await pydantic_agent(access, api).run(ASKED)).output

    @case(client, "two turns", ["Three.", "Seven."], "Seven.")
    async def two_turns(access: Access) -> str:
        agent = pydantic_agent(access, api)
        first = await agent.run(ASKED)
        return (await agent.run("And 3 + 4?", message_history=first.all_messages())).output

    @case(client, "stream", [TWO, "It is 3."], "It is 3.")
    async def stream(access: Access) -> str:
        async with pydantic_agent(access, api).run_stream(ASKED) as running:
            return await running.get_output()

    @case(client, "structured output", [call("final_result", '{"total": 3}')], "3")
    async def structured(access: Access) -> str:
        from pydantic import BaseModel

        class Sum(BaseModel):
            total: int

        return str((await pydantic_agent(access, api, output_type=Sum).run(ASKED)).output.total)

    @case(client, "rewritten history", ["Three.", "Seven."], "Seven.")
    async def rewritten(access: Access) -> str:
        agent = pydantic_agent(access, api)
        first = await agent.run(ASKED)
        return (await agent.run("And 3 + 4?", message_history=first.all_messages()[-1:])).output


of_pydantic_ai("chat")
of_pydantic_ai("Responses")
of_pydantic_ai("Messages")


# langgraph


def langgraph_model(access: Access, api: str) -> Any:
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    if api == "Messages":
        return ChatAnthropic(model=access.model, base_url=access.address, api_key=access.secret, max_retries=0)
    return ChatOpenAI(
        model=access.model,
        base_url=url(access),
        api_key=access.secret,
        use_responses_api=api == "Responses",
        max_retries=0,
    )


def langgraph_agent(access: Access, api: str) -> Any:
    from langgraph.prebuilt import create_react_agent

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return create_react_agent(langgraph_model(access, api), [add], prompt=OWN)


def last_text(state: Any) -> str:
    content = state["messages"][-1].content
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def of_langgraph(api: str) -> None:
    client = f"langgraph ({api})"

    @case(client, "tools", [TWO, "It is 3."], "It is 3.")
    async def tools(access: Access) -> str:
        return last_text(await langgraph_agent(access, api).ainvoke({"messages": [("user", ASKED)]}))

    @case(client, "two turns", ["Three.", "Seven."], "Seven.")
    async def two_turns(access: Access) -> str:
        agent = langgraph_agent(access, api)
        first = await agent.ainvoke({"messages": [("user", ASKED)]})
        return last_text(await agent.ainvoke({"messages": [*first["messages"], ("user", "And 3 + 4?")]}))

    @case(client, "stream", [TWO, "It is 3."], "It is 3.")
    async def stream(access: Access) -> str:
        state: Any = None
        chunks = 0
        streamed = langgraph_agent(access, api).astream(
            {"messages": [("user", ASKED)]}, stream_mode=["messages", "values"]
        )
        async for mode, value in streamed:
            chunks += mode == "messages"
            state = value if mode == "values" else state
        assert chunks > 2
        return last_text(state)

    @case(client, "structured output", ['{"total": 3}' if api != "Messages" else call("Sum", '{"total": 3}')], "3")
    async def structured(access: Access) -> str:
        from pydantic import BaseModel

        class Sum(BaseModel):
            """A sum."""

            total: int

        return str((await langgraph_model(access, api).with_structured_output(Sum).ainvoke(ASKED)).total)

    @case(client, "rewritten history", ["Three.", "Seven."], "Seven.")
    async def rewritten(access: Access) -> str:
        agent = langgraph_agent(access, api)
        first = await agent.ainvoke({"messages": [("user", ASKED)]})
        return last_text(await agent.ainvoke({"messages": [("user", f"So far: {last_text(first)}. And 3 + 4?")]}))


of_langgraph("chat")
of_langgraph("Responses")
of_langgraph("Messages")


# litellm


def of_litellm(name: str) -> None:
    client = f"litellm ({name}/)"

    def completion(access: Access, messages: Any, **more: Any) -> Any:
        import litellm

        base = access.address if name == "anthropic" else url(access)
        return litellm.completion(f"{name}/{access.model}", messages, api_base=base, api_key=access.secret, **more)

    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
    messages = [{"role": "system", "content": OWN}, {"role": "user", "content": ASKED}]

    @case(client, "tools", [TWO, "It is 3."], "It is 3.")
    def tools(access: Access) -> str:
        message = completion(access, messages, tools=[tool]).choices[0].message
        results = [{"role": "tool", "tool_call_id": one.id, "content": "3"} for one in message.tool_calls]
        more = [*messages, message.model_dump(), *results]
        return completion(access, more, tools=[tool]).choices[0].message.content

    @case(client, "two turns", ["Three.", "Seven."], "Seven.")
    def two_turns(access: Access) -> str:
        message = completion(access, messages).choices[0].message
        more = [*messages, message.model_dump(), {"role": "user", "content": "And 3 + 4?"}]
        return completion(access, more).choices[0].message.content

    @case(client, "stream", ["It is 3."], "It is 3.")
    def stream(access: Access) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in completion(access, messages, stream=True))

    @case(client, "rewritten history", ["Three.", "Seven."], "Seven.")
    def rewritten(access: Access) -> str:
        said = completion(access, messages).choices[0].message.content
        return completion(access, [messages[0], {"role": "user", "content": said}]).choices[0].message.content


of_litellm("openai")
of_litellm("hosted_vllm")
of_litellm("anthropic")


# mini-swe-agent


def swe_agent(access: Access) -> Any:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    settings = {"api_base": url(access), "api_key": access.secret}
    model = LitellmModel(model_name=f"openai/{access.model}", model_kwargs=settings, cost_tracking="ignore_errors")
    templates = {"system_template": OWN, "instance_template": "Solve this: {{task}}"}
    return DefaultAgent(model, LocalEnvironment(), step_limit=5, **templates)


SUBMIT = call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 3"}')


@case("mini-swe-agent", "tools", [call("bash", '{"command": "echo $((1 + 2))"}'), SUBMIT], "Submitted 3")
def swe_tools(access: Access) -> str:
    ended = swe_agent(access).run(ASKED)
    return f"{ended['exit_status']} {ended['submission']}"


@case("mini-swe-agent", "rewritten history", ["I do not call.", SUBMIT], "Submitted 3")
def swe_rewritten(access: Access) -> str:
    """The agent drops a turn without a call from its history, and says so to the policy."""
    ended = swe_agent(access).run(ASKED)
    return f"{ended['exit_status']} {ended['submission']}"


# smolagents


def smol_model(access: Access) -> Any:
    from smolagents import OpenAIServerModel

    return OpenAIServerModel(access.model, api_base=url(access), api_key=access.secret)


def smol_agent(access: Access, **more: Any) -> Any:
    from smolagents import ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    return ToolCallingAgent(tools=[add], model=smol_model(access), max_steps=4, verbosity_level=0, **more)


FINAL = call("final_answer", '{"answer": "It is 3."}')


@case("smolagents", "tools", [ADD, FINAL], "It is 3.")
def smol_tools(access: Access) -> str:
    return str(smol_agent(access).run(ASKED))


@case("smolagents", "stream", [ADD, FINAL], "It is 3.")
def smol_stream(access: Access) -> str:
    return str(smol_agent(access, stream_outputs=True).run(ASKED))


@case("smolagents", "two turns", [FINAL, FINAL], "It is 3.")
def smol_two_turns(access: Access) -> str:
    agent = smol_agent(access)
    agent.run(ASKED)
    return str(agent.run("And again?", reset=False))


@case("smolagents", "rewritten history", ["Thought: add.\n<code>\nfinal_answer(1 + 2)\n</code>"], "3")
def smol_code(access: Access) -> str:
    """Its agent that writes code has a system prompt of 10 kB of its own."""
    from smolagents import CodeAgent

    return str(CodeAgent(tools=[], model=smol_model(access), max_steps=3, verbosity_level=0).run(ASKED))


# autogen


def autogen_agent(access: Access, **more: Any) -> Any:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    abilities = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(
        model=access.model,
        base_url=url(access),
        api_key=access.secret,
        model_info={**abilities, "structured_output": True},
        max_retries=0,
    )
    return AssistantAgent("adder", client, tools=[add], system_message=OWN, reflect_on_tool_use=True, **more)


@case("autogen", "tools", [TWO, "It is 3."], "It is 3.")
async def autogen_tools(access: Access) -> str:
    return (await autogen_agent(access).run(task=ASKED)).messages[-1].content


@case("autogen", "two turns", ["Three.", "Seven."], "Seven.")
async def autogen_two_turns(access: Access) -> str:
    agent = autogen_agent(access)
    await agent.run(task=ASKED)
    return (await agent.run(task="And 3 + 4?")).messages[-1].content


@case("autogen", "stream", [TWO, "It is 3."], "It is 3.")
async def autogen_stream(access: Access) -> str:
    said = [one async for one in autogen_agent(access, model_client_stream=True).run_stream(task=ASKED)]
    return said[-1].messages[-1].content


@case("autogen", "rewritten history", ["Three.", "Seven."], "Seven.")
async def autogen_rewritten(access: Access) -> str:
    from autogen_core import CancellationToken

    agent = autogen_agent(access)
    await agent.run(task=ASKED)
    await agent.on_reset(CancellationToken())
    return (await agent.run(task="So far: 3. And 3 + 4?")).messages[-1].content
