"""Requests are found again by what they mean."""

from __future__ import annotations

from typing import Any

import pytest

from april.rollout.episodes.conversation_tree import ConversationTree, Node, meaning, saved
from april.rollout.episodes.turns import BadTurn, TurnRequest

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}


def ask(tree: ConversationTree, id: str, *messages: Any, answer: Any = None, **more: Any) -> Node:
    request = TurnRequest(messages, **more)
    node = tree.add(id, tree.find(request), request.key)
    if answer is not None:
        tree.said(node, answer)
    return node


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said("4"), said(" 4\n")),
        (said("4"), said([{"type": "text", "text": "4"}])),
        (said("4"), {**said("4"), "refusal": None, "audio": None, "tool_calls": None, "function_call": None}),
        (said(""), said(None)),
        (said("", tool_calls=[call("a", '{"a": 1, "b": 2}')]), said(None, tool_calls=[call("z", '{"b":2,"a":1}')])),
        ({"role": "developer", "content": "x"}, {"content": "x", "role": "system"}),
        ({"role": "tool", "tool_call_id": "a", "content": "3"}, {"role": "tool", "tool_call_id": "z", "content": "3"}),
    ],
)
def test_messages_of_equal_meaning(one: Any, other: Any) -> None:
    assert meaning(one) == meaning(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said("4"), said("5")),
        (said("4"), user("4")),
        (said("", tool_calls=[call("a", '{"a": 1}')]), said("", tool_calls=[call("a", '{"a": 2}')])),
        (said("", tool_calls=[call("a", "{}")]), said("")),
        ({**user("4"), "name": "x"}, user("4")),
        (
            user([{"type": "image_url", "image_url": {"url": "a"}}]),
            user([{"type": "image_url", "image_url": {"url": "b"}}]),
        ),
    ],
)
def test_messages_of_other_meaning(one: Any, other: Any) -> None:
    assert meaning(one) != meaning(other)


def test_arguments_of_any_depth_have_a_meaning() -> None:
    deep = said("", tool_calls=[call("a", "[" * 5000 + "]" * 5000)])
    assert meaning(deep) == meaning(deep) != meaning(said("", tool_calls=[call("a", "[]")]))


def test_thinking_that_is_left_out_begins_another_conversation_unless_it_is_kept() -> None:
    for keep in (False, True):
        tree = ConversationTree(keep)
        node = ask(tree, "0", user("q"), answer=said("a", reasoning_content="hm"))
        match = tree.find(TurnRequest([user("q"), said("a"), user("r")]))
        assert (match.after is node) == keep
        assert tree.find(TurnRequest([user("q"), said("a", reasoning_content="hm "), user("r")])).after is node


def test_the_longest_match_is_continued() -> None:
    tree = ConversationTree()
    first = ask(tree, "0", user("q"), answer=said("a"))
    second = ask(tree, "1", user("q"), said("a"), user("r"), answer=said("b"))
    assert second.after is first
    match = tree.find(TurnRequest([user("q"), said("a"), user("r"), said("b"), user("s")]))
    assert (match.after, list(match.messages)) == (second, [user("s")])
    match = tree.find(TurnRequest([user("q"), said("a"), user("other")]))
    assert (match.after, list(match.messages)) == (first, [user("other")])
    match = tree.find(TurnRequest([user("q"), said("a rewritten"), user("r")]))
    assert match.after is None
    match = tree.find(TurnRequest([user("s")], parent="1"))
    assert (match.after, list(match.messages)) == (second, [user("s")])


def test_other_tools_begin_another_conversation() -> None:
    tree = ConversationTree()
    tools = [{"type": "function", "function": {"name": "add"}}]
    ask(tree, "0", user("q"), answer=said("a"))
    match = tree.find(TurnRequest([user("q"), said("a"), user("r")], tools))
    assert match.after is None
    match = tree.find(TurnRequest([user("r")], tools, parent="0"))
    assert (match.after, list(match.messages)) == (None, [user("q"), said("a"), user("r")])


def test_of_equal_turns_the_one_that_nothing_follows_is_continued() -> None:
    tree = ConversationTree()
    for id in "01":
        ask(tree, id, user("q"), answer=said("a"))
    follow = [ask(tree, id, user("q"), said("a"), user("r")) for id in "23"]
    assert [node.after.id for node in follow if node.after] == ["0", "1"]


def test_a_request_is_the_same_if_its_answer_reached_nobody() -> None:
    tree = ConversationTree()
    node = ask(tree, "0", user("q"))
    request = TurnRequest([user("q")])
    assert tree.find(request).same == [node]
    node.waiting = 1
    assert tree.find(request).same == []
    assert tree.find(TurnRequest([user("q")], retry=True)).same == [node]
    node.waiting, node.delivered = 0, True
    assert tree.find(request).same == []
    assert tree.find(TurnRequest([user("q")], retry=True)).same == [node]
    keyed = ask(tree, "1", user("q"), key="k")
    assert tree.find(TurnRequest([user("anything")], key="k")).same == [keyed]
    other = TurnRequest([user("q")], key="other")
    assert tree.find(other).same == [keyed], "a client that chooses keys at random repeats its request"
    tree.ask(keyed, "other")
    keyed.delivered = True
    assert tree.find(other).same == [keyed]
    assert tree.find(TurnRequest([user("q")], key="third")).same == []


def test_a_restored_tree_is_the_same_tree() -> None:
    tree, again = ConversationTree(), ConversationTree()
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = [
        (TurnRequest([user("q")], tools), said("", tool_calls=[call("a", "{}")])),
        (TurnRequest([user("r")], parent="0", key="k"), said("b")),
        (TurnRequest([user("other")]), None),
    ]
    for number, (request, answer) in enumerate(asked):
        match = tree.find(request)
        beginning = tree.beginning(match)
        node = tree.add(str(number), match, request.key)
        copy = again.again(str(number), saved(match, request, beginning))
        for one, place in ((tree, node), (again, copy)):
            if answer is not None:
                one.said(place, answer)
    whole = TurnRequest([user("q"), said("", tool_calls=[call("x", " {}")]), user("r"), said("b"), user("s")], tools)
    assert [node.id for node in again] == [node.id for node in tree]
    for one in (tree, again):
        assert one.find(whole).after is one.nodes["1"]
        assert one.find(TurnRequest([user("r")], parent="0", key="k")).same == [one.nodes["1"]]
    assert again.unrequested == list(again)
    again.ask(again.nodes["0"])
    again.ask(again.nodes["1"])
    assert [node.id for node in again.unrequested] == ["2"]
    again.forget_clients()
    again.ask(again.nodes["1"])
    assert not again.unrequested, "who continues a turn without having asked for it has outlived april"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (TurnRequest([]), "no messages"),
        (TurnRequest([user("q"), said("a")]), "ends with the policy's own turn"),
        (TurnRequest([user("r")], parent="9"), "no turn '9'"),
        (TurnRequest([user("r")], parent="1"), "has not ended"),
    ],
)
def test_a_wrong_request_is_refused(request_: TurnRequest, reason: str) -> None:
    tree = ConversationTree()
    ask(tree, "0", user("q"), answer=said("a"))
    ask(tree, "1", user("p"))
    with pytest.raises(BadTurn, match=reason):
        tree.find(request_)


def test_only_a_program_that_asks_one_by_one_is_known_to_diverge() -> None:
    tree = ConversationTree()
    ask(tree, "0", user("q"), answer=said("a"))
    ask(tree, "1", user("q"), said("a"), user("r"), answer=said("b"))
    assert tree.diverges(tree.find(TurnRequest([user("another")])))
    tree.ask(tree.nodes["0"])
    assert tree.diverges(tree.find(TurnRequest([user("q"), said("a"), user("else")])))
    tree.ask(tree.nodes["1"])
    assert not tree.diverges(tree.find(TurnRequest([user("another")])))
    ask(tree, "2", user("another"))
    assert not tree.diverges(tree.find(TurnRequest([user("third")])))


def test_a_turn_may_be_continued_by_another_name_also_after_a_crash() -> None:
    tree = ConversationTree()
    request = TurnRequest([user("q")], alias="x")
    match = tree.find(request)
    node = tree.add("0", match)
    tree.name(node, request.alias)
    tree.said(node, said("a"))
    restored = ConversationTree()
    restored.said(restored.again("0", saved(match, request, None)), said("a"))
    for one in (tree, restored):
        after = one.find(TurnRequest([user("r")], parent="x")).after
        assert after is not None
        assert after.id == "0"


def test_a_parent_with_another_system_prompt_begins_another_conversation() -> None:
    """Agents hand over to another agent with `previous_response_id` and instructions of its own."""
    tree = ConversationTree()
    one, two = ({"role": "system", "content": text} for text in ("You are A.", "You are B."))
    node = ask(tree, "0", one, user("q"), answer=said("a"), tools=(TOOL,))
    for system in (None, "You are A.", " You are A.\n"):
        assert tree.find(TurnRequest([user("r")], parent="0", system=system)).after is node
    match = tree.find(TurnRequest([user("r")], parent="0", system="You are B."))
    assert match.after is None
    assert match.messages == [two, user("q"), said("a"), user("r")]
    assert match.tools == (TOOL,)
    handed = tree.add("1", match)
    tree.said(handed, said("b"))
    assert tree.find(TurnRequest([user("s")], parent="1", system="You are B.")).after is handed
    whole = TurnRequest([two, user("q"), said("a"), user("r"), said("b"), user("s")], tools=(TOOL,))
    assert tree.find(whole).after is handed
    plain = ask(tree, "2", user("q"), answer=said("a"))
    match = tree.find(TurnRequest([user("r")], parent="2", system="You are A."))
    assert (match.after, match.messages[0]) == (None, one)
    assert tree.find(TurnRequest([user("r")], parent="2")).after is plain
