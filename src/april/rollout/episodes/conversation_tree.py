"""The conversation of one episode as a tree of turns, found again by what their requests mean.

A node is a turn of the policy with its request. A request is compared message by message with all earlier messages. It
continues the turn at the end of the longest match, and its messages behind that turn are new.
Nothing here handles tokens, time or connections.

Invariants:
- messages are compared by meaning: white space at their ends, parts or text, ids of tool calls, the order of keys and
  null fields do not count, nor does thinking that the client leaves out if `keep_thinking` is set;
- images are compared by their sources, which name the hash of the content;
- tools are part of the beginning of a conversation: other tools begin another one;
- a request that has the key of an earlier one, equals one and is marked as sent again, or equals one whose answer was
  not delivered, is that request; any other equal request is a new turn. Equal requests have equal settings;
- a program that continues a turn which no client of this process has requested has outlived april, and need not ask
  again for anything;
- a node is continued only after the policy has ended its turn.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from april.rollout.episodes.environment import Message
from april.rollout.episodes.turns import SETTINGS, BadTurn, TurnRequest

RECENT = 4
"""Beginnings of conversations that a new one is compared with."""


@dataclass(slots=True, eq=False)
class Place:
    """A point of the tree: the messages up to here."""

    behind: dict[Hashable, Place] = field(default_factory=dict)
    """The places one message further."""
    asked: list[Node] = field(default_factory=list)
    """Turns that were requested here."""
    ended: list[Node] = field(default_factory=list)
    """Turns whose message leads here."""

    def further(self, meaning: Hashable) -> Place:
        """Return the place one message further, which is made if it is new."""
        place = self.behind.get(meaning)
        if place is None:
            place = self.behind[meaning] = Place()
        return place


@dataclass(slots=True, eq=False)
class Node:
    """A turn of the policy.

    Attributes:
        id: name of the turn, the same after a crash.
        after: the turn that the request continues; None at the beginning of a conversation.
        messages: messages of the request after that turn.
        tools: tools that the request offers.
        settings: the request's own settings, `TurnRequest.settings`.
        message: the turn as a message, once it has ended.
        stop: the stop string that ended it, if one did.
        delivered: whether the answer was sent to a client of this process.
        waiting: callers that wait for the answer.
        requested: whether a client of this process has requested the turn, or one after it.
    """

    id: str
    after: Node | None
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    place: Place
    settings: Mapping[str, Any]
    message: Message | None = None
    stop: str | None = None
    delivered: bool = False
    waiting: int = 0
    requested: bool = False
    followers: list[Node] = field(default_factory=list)

    @property
    def path(self) -> list[Node]:
        """The turns from the beginning to this one."""
        path, node = [], self
        while True:
            path.append(node)
            if node.after is None:
                return path[::-1]
            node = node.after


class Match(NamedTuple):
    """Place of a request in the tree.

    Attributes:
        same: turns that are the answer already, or will be: at most `n` of the request.
        after: the turn that the request continues.
        messages: the request's messages behind that turn.
        tools: the tools that it offers.
        place: position in the tree at which the turn is requested.
    """

    same: Sequence[Node]
    after: Node | None
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    place: Place


class ConversationTree:
    """The turns of an episode.

    Args:
        keep_thinking: a message without `reasoning_content` matches a turn that has some, and the thinking stays in the
            context. Without it, such a message is another one, as it is where the model is served.
    """

    def __init__(self, keep_thinking: bool = False) -> None:
        self.keep_thinking = keep_thinking
        self.nodes: dict[str, Node] = {}
        self._beginnings: dict[str, Place] = {}
        """The first place for each set of tools."""
        self._roots: list[Node] = []
        self._keys: dict[str | None, list[Node]] = {}
        self._aliases: dict[str, str] = {}
        """Ids of nodes by the other names that requests gave them."""

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def find(self, request: TurnRequest) -> Match:
        """Find the place of a request, which is made if it is new.

        Raises:
            BadTurn: the request has no new message, or names a turn that does not exist or has not ended.
        """
        before, messages, tools = None, list(request.messages), request.tools
        if request.parent is not None:
            before = self._named(request.parent)
            tools = request.tools or before.tools
            if (beginning := self._another_beginning(before, request)) is not None:
                messages = [*beginning, *messages]
                before = None
        if not messages:
            raise BadTurn("the request has no messages")
        place = self._start(before, tools)
        after, known = before, 0
        for index, message in enumerate(messages, 1):
            place = place.further(self._meaning(message))
            if place.ended:
                # Of equal turns, the one that nothing follows yet, so that each is continued before one is branched.
                after, known = min(place.ended, key=lambda node: (not node.requested, len(node.followers))), index
        if known == len(messages):
            raise BadTurn("the request ends with the policy's own turn: add a message that it answers")
        return Match(self._same(request, place), after, messages[known:], tools, place)

    def _another_beginning(self, before: Node, request: TurnRequest) -> list[Message] | None:
        """Return the messages up to a turn under a request's own system prompt; None if they are the turn's own.

        Tools and system prompt are at the beginning of the tokens: with others, the whole conversation is another one.
        """
        other_tools = request.tools and _tools(request.tools) != _tools(before.tools)
        first = before.path[0].messages[0]
        begins = first["role"] == "system"
        if request.system is None:
            return self.messages(before) if other_tools else None
        system: Message = {"role": "system", "content": request.system}
        if not other_tools and begins and self._meaning(first) == self._meaning(system):
            return None
        return [system, *self.messages(before)[begins:]]

    def _named(self, id: str) -> Node:
        node = self.nodes.get(self._aliases.get(id, id))
        if node is None:
            raise BadTurn(f"there is no turn {id!r} in this episode", "not_found")
        if node.message is None:
            raise BadTurn(f"turn {id!r} has not ended yet")
        return node

    def _same(self, request: TurnRequest, place: Place) -> list[Node]:
        if request.key in self._keys:
            return self._keys[request.key][: request.n]
        equal = [node for node in place.asked if node.settings == request.settings]
        lost = [node for node in equal if not node.delivered and not node.waiting]
        if request.retry and len(lost) < request.n:
            # The latest ones: the client repeats its last request.
            others = [node for node in equal if node not in lost]
            lost += others[len(others) - min(request.n - len(lost), len(others)) :]
        return lost[: request.n]

    def _start(self, after: Node | None, tools: Sequence[Mapping[str, Any]]) -> Place:
        """Return the place behind a turn; behind none, the beginning with these tools."""
        if after is None:
            return self._beginnings.setdefault(_tools(tools), Place())
        assert after.message is not None
        return after.place.behind[self._meaning(after.message)]

    def add(
        self, id: str, match: Match, key: str | None = None, settings: Mapping[str, Any] = MappingProxyType({})
    ) -> Node:
        """Add a turn that was requested, with the request's own settings."""
        assert id not in self.nodes, "a turn has one name"
        node = Node(id, match.after, match.messages, match.tools, match.place, settings)
        self.nodes[id] = node
        match.place.asked.append(node)
        (self._roots if match.after is None else match.after.followers).append(node)
        self._give_key(node, key)
        return node

    def beginning(self, match: Match) -> tuple[Node, int] | None:
        """Return the recent beginning of a conversation that has most of the first messages of a new one, word for
        word, and the number of these messages; None if there is none."""
        if match.after is not None:
            return None
        counts = [(_equal_messages(root.messages, match.messages), root) for root in self._roots[-RECENT:]]
        count, root = max(counts, key=lambda one: one[0], default=(0, None))
        return None if root is None or not count else (root, count)

    def _give_key(self, node: Node, key: str | None) -> None:
        if key is not None and node not in (named := self._keys.setdefault(key, [])):
            named.append(node)

    def again(self, id: str, request: Mapping[str, Any]) -> Node:
        """Add a turn of a saved episode, with what `saved` returned for it; turns before it were added before."""
        after = None if request["after"] is None else self.nodes[request["after"]]
        tools = request.get("tools", []) if after is None else after.tools
        messages = request["messages"]
        if (begins := request.get("begins")) is not None:
            messages = [*self.nodes[begins[0]].messages[: begins[1]], *messages]
        place = self._start(after, tools)
        for message in messages:
            place = place.further(self._meaning(message))
        match = Match((), after, messages, tools, place)
        settings = {name: request[name] for name in SETTINGS if name in request}
        node = self.add(id, match, request.get("key"), settings)
        self.name(node, request.get("alias"))
        return node

    def name(self, node: Node, alias: str | None) -> None:
        """Give a turn another name."""
        if alias is not None:
            self._aliases[alias] = node.id

    def said(self, node: Node, message: Message, stop: str | None = None) -> None:
        """The policy has ended a turn, with a stop string if one is given."""
        if node.message is None:
            node.message, node.stop = message, stop
            node.place.further(self._meaning(message)).ended.append(node)

    def messages(self, node: Node) -> list[Message]:
        """Return the messages from the beginning to the end of a turn."""
        messages: list[Message] = []
        for one in node.path:
            messages += one.messages
            if one.message is not None:
                messages.append(one.message)
        return messages

    @property
    def whole(self) -> list[list[Message]]:
        """The messages of each branch, from its beginning to its last turn."""
        continued = {id(node.after) for node in self}
        return [self.messages(node) for node in self if id(node) not in continued]

    def ask(self, node: Node, key: str | None = None) -> None:
        """A client of this process has requested a turn, so it has seen the turns before.

        A client that has seen a turn which no client of this process requested outlived april: it will not request
        the other turns again either.

        Args:
            key: idempotency key of the request; clients that choose keys at random use another one after a crash.
        """
        self._give_key(node, key)
        if node.after is not None and not node.after.requested:
            for known in self:
                known.requested = True
        for one in reversed(node.path):
            if one.requested and one is not node:
                break
            one.requested = True
            one.delivered = one.delivered or one is not node

    def forget_clients(self) -> None:
        """Another program takes over, and repeats every request."""
        for node in self:
            node.delivered = node.requested = False

    @property
    def unrequested(self) -> list[Node]:
        """Turns of the time before a crash that no client has requested again."""
        return [node for node in self if not node.requested]

    def diverges(self, match: Match) -> bool:
        """Whether a new request shows that the program does not repeat its requests of the time before a crash. Of
        programs with parallel requests that is not known before their end: the order of their requests may differ."""
        siblings = self._roots if match.after is None else match.after.followers
        sequential = len(self._roots) < 2 and all(len(node.followers) < 2 for node in self)
        return sequential and any(not node.requested for node in siblings)

    def _meaning(self, message: Message) -> Hashable:
        return meaning(message, self.keep_thinking)


def saved(match: Match, request: TurnRequest, beginning: tuple[Node, int] | None) -> dict[str, Any]:
    """Return a request with its place as JSON types; `ConversationTree.again` restores the node.

    Args:
        beginning: of `ConversationTree.beginning`. Those messages are saved with that node alone.
    """
    after = match.after
    asked: dict[str, Any] = {"messages": list(match.messages), "after": None if after is None else after.id}
    if beginning is not None:
        node, count = beginning
        asked |= {"messages": asked["messages"][count:], "begins": [node.id, count]}
    if after is None and match.tools:
        asked["tools"] = list(match.tools)
    if request.key is not None:
        asked["key"] = request.key
    asked |= request.settings
    if request.alias is not None:
        asked["alias"] = request.alias
    return asked


def shared_with(match: Match, beginning: tuple[Node, int] | None) -> Match:
    """Return a match that has the messages of a beginning in common with its node, so that they are in memory once."""
    if beginning is None:
        return match
    node, count = beginning
    return match._replace(messages=[*node.messages[:count], *match.messages[count:]])


def _equal_messages(one: Sequence[Message], other: Sequence[Message]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def meaning(message: Message, keep_thinking: bool = False) -> Hashable:
    """Return a value that is equal for messages of equal meaning."""
    role = message.get("role")
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else _content(content)
    if role == "tool" or role == "user" or role == "system":
        return role, text, message.get("name")
    if role == "assistant":
        calls = message.get("tool_calls")
        thought = None if keep_thinking else (message.get("reasoning_content") or "").strip()
        return role, text, thought, tuple(map(_call, calls)) if calls else None
    return "system" if role == "developer" else role, text, message.get("name")


def _content(content: Any) -> Hashable:
    """Return content that is no text as text, and with images as a tuple of texts and images.

    Parts that are texts stand one behind the other, other parts as JSON."""
    if content is None:
        return ""
    if not isinstance(content, Sequence):
        return _plain(content)
    texts, parts = [""], list[Hashable]()
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "image":
            parts += ["".join(texts), ("image", part.get("image"))]
            texts = []
        else:
            texts.append(str(part["text"] if isinstance(part, Mapping) and "text" in part else _plain(part)))
    last = "".join(texts)
    return (str(parts[0]).lstrip(), *parts[1:], last.rstrip()) if parts else last.strip()


def _call(call: Any) -> Hashable:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments")
    return function.get("name"), _arguments(arguments) if isinstance(arguments, str) else _plain(arguments)


@lru_cache(4096)
def _arguments(text: str) -> str:
    """Return the arguments of a call in one spelling. Each is compared once a turn, and parsing takes microseconds."""
    try:
        return _plain(json.loads(text))
    except (ValueError, RecursionError):
        return text.strip()


def _plain(value: Any) -> str:
    """Return JSON types as text, without null fields."""
    if isinstance(value, Mapping):
        value = {key: inner for key, inner in value.items() if inner is not None}
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    return _plain(list(tools)) if tools else ""
