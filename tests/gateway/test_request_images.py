"""Images in requests: files of the run by hash, the same message in each API, and errors in the API's own shape."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

from april.images.kept import KeptImages
from april.images.store import ImageError, NoImages
from tests import vision
from tests.gateway.scripted import ScriptedPolicy, served


def png(colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (24, 16), colour).save(file, "PNG")
    return file.getvalue()


def uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def chat(image: Any, role: str = "user") -> tuple[str, dict[str, Any]]:
    content = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": image, "detail": "low"}}]
    return "/v1/chat/completions", {"messages": [{"role": role, "content": content}]}


def chat_tool(image: Any) -> tuple[str, dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    path, body = chat(image, "tool")
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return path, {"messages": [*asked, *body["messages"]]}


def responses(image: Any) -> tuple[str, dict[str, Any]]:
    content = [{"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": image}]
    return "/v1/responses", {"input": [{"role": "user", "content": content}]}


def responses_tool(image: Any) -> tuple[str, dict[str, Any]]:
    output = [{"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": image}]
    asked = [{"role": "user", "content": "?"}]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    return "/v1/responses", {
        "input": [*asked, call, {"type": "function_call_output", "call_id": "c", "output": output}]
    }


def blocks(image: str) -> list[dict[str, Any]]:
    kind, _, data = image.removeprefix("data:").partition(";base64,")
    source = {"type": "base64", "media_type": kind, "data": data} if data else {"type": "url", "url": image}
    return [{"type": "text", "text": "See"}, {"type": "image", "source": source}]


def messages(image: str) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": blocks(image)}]}


def messages_tool(image: str) -> tuple[str, dict[str, Any]]:
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": blocks(image)}
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [call]}]
    return "/v1/messages", {"max_tokens": 9, "messages": [*asked, {"role": "user", "content": [result]}]}


APIS = [chat, chat_tool, responses, responses_tool, messages, messages_tool]


async def post(access: Any, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {access.secret}"}
    url, sent = access.address + path, {"model": "policy", **body}
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=sent) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("api", APIS)
async def test_an_image_becomes_a_file_named_by_its_hash(api: Any, tmp_path: Path) -> None:
    policy = ScriptedPolicy(["Red.", "Red."])
    async with served(policy, KeptImages(tmp_path, vision.image_store())) as (_, access):
        for _ in range(2):
            status, answer = await post(access, *api(uri(png())))
            assert status == 200, answer
    name = hashlib.sha256(png()).hexdigest()
    assert [file.name for file in (tmp_path / "images").iterdir()] == [name]
    assert (tmp_path / "images" / name).read_bytes() == png()
    for request in policy.requests:
        source = f"run:{name}"
        assert request.messages[-1]["content"] == [
            {"type": "text", "text": "See"},
            {"type": "image", "image": source},
        ]
        assert request.messages[-1]["role"] == ("tool" if "tool" in api.__name__ else "user")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("http://example.org/a.png", "april fetches no addresses"),
        ("/etc/passwd", "reads no files for programs"),
        ("data:image/png;base64,!!!!", "base64 cannot be decoded"),
        (uri(b"no image"), "cannot be decoded"),
        (uri(png()[:-30]), "cannot be decoded"),
    ],
)
async def test_an_image_that_cannot_be_read_is_an_error_of_the_request(
    api: Any, image: str, said: str, tmp_path: Path
) -> None:
    policy = ScriptedPolicy([])
    async with served(policy, KeptImages(tmp_path, vision.image_store())) as (_, access):
        status, answer = await post(access, *api(image))
    assert status == 400
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]
    assert "\n" not in error["message"]
    if "messages" not in api.__name__:
        assert error["code"] in ("invalid_image", "invalid_image_url")
    assert not policy.requests
    assert not (tmp_path / "images").exists()


async def test_a_policy_without_images_says_so(tmp_path: Path) -> None:
    none = NoImages("the policy reads none (model.path = 'x', qwen3)")
    for images, said in ((KeptImages(tmp_path, none), "the policy reads none"), (None, "takes text, and no images")):
        async with served(ScriptedPolicy([]), images) as (_, access):
            status, answer = await post(access, *chat(uri(png())))
        assert status == 400
        assert said in answer["error"]["message"]


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_images_are_in_messages_of_users_and_tools_alone(role: str, tmp_path: Path) -> None:
    async with served(ScriptedPolicy([]), KeptImages(tmp_path, vision.image_store())) as (_, access):
        status, answer = await post(access, *chat(uri(png()), role))
    assert status == 400
    assert "it takes no part of type 'image_url'" in answer["error"]["message"]


def test_a_file_is_written_once_and_whole(tmp_path: Path) -> None:
    kept = KeptImages(tmp_path, vision.image_store())
    source = kept.keep(png())
    [file] = (tmp_path / "images").iterdir()
    written = file.stat().st_mtime_ns
    assert kept.keep(png()) == source
    assert file.stat().st_mtime_ns == written
    assert kept.keep(png("blue")) != source
    with pytest.raises(ImageError, match="cannot be decoded"):
        kept.keep(b"")
    assert len(list((tmp_path / "images").iterdir())) == 2
