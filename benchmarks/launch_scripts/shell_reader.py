"""Reads the commands of a shell script without running it.

Variables, arrays, defaults (`${NAME:-value}`), sums (`$((2 * n))`), `if`, `case` and `source` are followed as far as
they depend on the script alone. The output of a command (`$(...)`) is unknown, and so is a condition on it: its first
branch is read.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path

UNKNOWN = "unknown"
"""Value of `$(...)`, and of variables that the script does not set."""

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
PATTERNS = re.compile(r"\(?[\w.*?\"'-]+(?:\s*\|\s*[\w.*?\"'-]+)*\)")
"""Patterns of a branch of `case`, at the start of a statement."""
CLOSING = {"${": "}", "$(": ")", "`": "`", "(": ")"}
PREFIXES = ("export", "local", "readonly", "declare", "typeset")
KEYWORDS = ("then", "do", "done", "{", "}", "time", "exec", "set", ";;")


def closing(text: str, start: int, opened: str) -> int:
    """Return the position after the bracket that closes `opened`, whose content begins at `start`."""
    depth, i, quote = 1, start, ""
    close = CLOSING[opened]
    while i < len(text):
        char = text[i]
        if char == "\\":
            i += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif opened == "(" and char == "#" and text[i - 1] in " \t\n(":
            i = text.find("\n", i)
            if i < 0:
                return len(text)
        elif char == close:
            depth -= 1
            if not depth:
                return i + 1
        elif char == opened[-1]:
            depth += 1
        i += 1
    return len(text)


def statements(text: str) -> Iterator[list[str]]:
    """Yield the words of each statement, with quotes and `$` as written. Comments are left out."""
    text = text.replace("\\\n", " ")
    words: list[str] = []
    start = i = 0
    inside = ""

    def end_word(position: int) -> None:
        if position > start:
            words.append(text[start:position])

    while i < len(text):
        char = text[i]
        patterns = PATTERNS.match(text, i) if start == i and not words and not inside else None
        if patterns:
            words.append("".join(patterns[0].split()))
            i = start = patterns.end()
        elif char == "\\":
            i += 2
        elif inside == "'":
            inside = "" if char == "'" else inside
            i += 1
        elif text.startswith(("${", "$("), i):
            i = closing(text, i + 2, text[i : i + 2])
        elif char == "`":
            i = closing(text, i + 1, "`")
        elif inside:
            inside = "" if char == inside else inside
            i += 1
        elif char in "'\"":
            inside, i = char, i + 1
        elif char == "(" and text[start:i].endswith("="):
            i = closing(text, i + 1, "(")
        elif char == "#" and start == i:
            i = text.find("\n", i)
            i = start = len(text) if i < 0 else i
        elif char in " \t":
            end_word(i)
            i = start = i + 1
        elif char in "\n;&|" and not (char == "&" and text[i - 1 : i] == ">"):
            end_word(i)
            double = text[i : i + 2] == ";;"
            if words:
                yield words
            if double:
                yield [";;"]
            words = []
            i = start = i + 1 + double
        else:
            i += 1
    end_word(i)
    if words:
        yield words


class ShellScript:
    """The commands of a script, with variables replaced.

    Args:
        path: the script; `source` is followed from its folder.
        given: variables of the environment.
    """

    def __init__(self, path: Path, given: dict[str, str] | None = None) -> None:
        self.folder = path.parent
        self.variables: dict[str, list[str]] = {name: [value] for name, value in (given or {}).items()}
        self.commands: list[list[str]] = []
        self._read(path.read_text(errors="replace"))

    def _read(self, text: str) -> None:
        branches: list[bool | None] = []
        """For each open `if` or `case`: whether the current branch is read; None after the branch that was read."""
        cases: list[str] = []
        for words in statements(text):
            while words and words[0] in KEYWORDS and words != [";;"]:
                words = words[1:]
            if not words:
                continue
            if self._branch(words, branches, cases):
                continue
            while words and words[0] in (*KEYWORDS, "else"):
                words = words[1:]
            if words and all(branches):
                self._run(words)

    def _branch(self, words: list[str], branches: list[bool | None], cases: list[str]) -> bool:
        """Follow `if` and `case`; return whether nothing is left of the statement."""
        first = words[0]
        if first == "if":
            branches.append(self._holds(words[1:]))
        elif first == "elif":
            branches[-1:] = [self._holds(words[1:]) if branches and branches[-1] is False else None]
        elif first == "else":
            branches[-1:] = [True if branches and branches[-1] is False else None]
            return len(words) == 1
        elif first == "fi":
            del branches[-1:]
        elif first == "case":
            cases.append(" ".join(self.expand(words[1])) if len(words) > 1 else "")
            branches.append(False)
            if len(words) > 3:
                return self._pattern(words, words[3:], branches, cases)
        elif first == "esac" and cases:
            cases.pop()
            del branches[-1:]
        elif first == ";;" and cases:
            branches[-1:] = [False if branches[-1] is False else None]
        elif cases and branches[-1] is False and re.match(r"\(?[^()$]*\)$", first):
            return self._pattern(words, words, branches, cases)
        else:
            return False
        return True

    def _pattern(self, words: list[str], rest: list[str], branches: list[bool | None], cases: list[str]) -> bool:
        patterns = [pattern.strip("\"'") for pattern in rest[0].strip("()").split("|")]
        if cases[-1] in patterns or "*" in patterns:
            branches[-1] = True
        words[:] = rest[1:]
        return not words

    def _holds(self, condition: list[str]) -> bool:
        """Whether a condition holds; True if it is unknown."""
        words = [word for raw in condition if raw not in ("[", "[[", "]", "]]") for word in self.expand(raw) or [""]]
        if len(words) == 2 and words[0] in ("-z", "-n") and UNKNOWN not in words:
            return bool(words[1]) is (words[0] == "-n")
        if len(words) == 3 and words[1] in ("=", "==", "!=") and UNKNOWN not in words:
            return (words[0] == words[2]) is (words[1] != "!=")
        return True

    def _run(self, words: list[str]) -> None:
        if words[0] in PREFIXES:
            words = words[1:]
        while words and (match := re.match(r"(\w+)(\+?)=", words[0])):
            name, raw = match[1], words[0][match.end() :]
            if raw.startswith("("):
                value = [word for part in statements(raw[1:-1]) for w in part for word in self.expand(w)]
            else:
                value = [" ".join(self.expand(raw))]
            before = self.variables.get(name, []) if match[2] else []
            joined = bool(match[2]) and not raw.startswith("(")
            self.variables[name] = ["".join(before + value)] if joined else before + value
            words = words[1:]
        if not words:
            return
        command = [word for raw in words for word in self.expand(raw)]
        if command and command[0] in ("source", ".") and len(command) > 1:
            sourced = self.folder / command[1]
            if sourced.is_file():
                self._read(sourced.read_text(errors="replace"))
        elif command:
            self.commands.append(command)

    def expand(self, raw: str) -> list[str]:
        """Return the words that a word as written stands for."""
        if re.fullmatch(r'"\$(@|\{\w+\[@\]\})"', raw):
            return self._expansion(raw, 1)[0]
        words: list[str] = []
        text, begun, i, quoted = "", False, 0, False
        while i < len(raw):
            char = raw[i]
            if char == "'" and not quoted:
                end = raw.find("'", i + 1)
                end = len(raw) if end < 0 else end
                text, begun, i = text + raw[i + 1 : end], True, end + 1
            elif char == '"':
                quoted, begun, i = not quoted, True, i + 1
            elif char == "\\" and i + 1 < len(raw):
                keeps = quoted and raw[i + 1] not in '"\\$`\n'
                text, begun, i = text + ("\\" if keeps else "") + raw[i + 1], True, i + 2
            elif char in "$`":
                values, i = self._expansion(raw, i)
                if not quoted:
                    values = [part for value in values for part in value.split()]
                if values:
                    words.extend([text + values[0], *values[1:]])
                    text, begun = words.pop(), True
            else:
                text, begun, i = text + char, True, i + 1
        return [*words, text] if begun else words

    def _expansion(self, raw: str, i: int) -> tuple[list[str], int]:
        """Return the values of the expansion at a position, and the position after it."""
        if raw.startswith("$((", i):
            end = closing(raw, i + 2, "$(")
            return [self._sum(raw[i + 3 : end - 2])], end
        if raw.startswith("$(", i) or raw[i] == "`":
            end = closing(raw, i + 2, "$(") if raw[i] == "$" else closing(raw, i + 1, "`")
            here = re.search(r"BASH_SOURCE|\$\{?0\}?|^pwd$", raw[i:end])
            return [str(self.folder) if here else UNKNOWN], end
        if raw.startswith("${", i):
            end = closing(raw, i + 2, "${")
            return self._parameter(raw[i + 2 : end - 1]), end
        match = re.compile(r"\$(\w+|[@*#?$!])").match(raw, i)
        if match is None:
            return ["$"], i + 1
        return self._value(match[1]), match.end()

    def _parameter(self, inside: str) -> list[str]:
        match = re.match(r"(\w+|@)(\[[@*]\])?(?::?([-=+])(.*))?", inside, re.DOTALL)
        if match is None:
            return []
        name, array, kind, word = match.groups()
        values = self.variables.get(name, []) if array or kind else self._value(name)
        if kind == "+":
            return self.expand(word) if any(values) else []
        if kind and not any(values):
            values = self.expand(word)
            if kind == "=":
                self.variables[name] = values
        return values

    def _value(self, name: str) -> list[str]:
        """Return a variable's values; a variable that the script does not set is unknown, its arguments are none."""
        given = name[0].isalpha() or name[0] == "_"
        return self.variables.get(name, [UNKNOWN] if given else [])

    def _sum(self, text: str) -> str:
        """Return the value of an arithmetic expression, or `unknown`."""
        for _ in range(5):
            text = re.sub(r"\$\{?(\w+)\}?|\b([A-Za-z_]\w*)\b", self._number, text)
            if UNKNOWN in text:
                return UNKNOWN
        try:
            return str(_computed(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return UNKNOWN

    def _number(self, match: re.Match[str]) -> str:
        return f"({''.join(self.variables.get(match[1] or match[2], ['0'])) or '0'})"


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.BinOp) and (compute := OPERATORS.get(type(node.op))):
        return compute(_computed(node.left), _computed(node.right))
    raise ValueError(ast.dump(node))
