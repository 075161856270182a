"""Problems as the token ids that a policy continues.

Invariant: a prompt does not end with an end-of-sequence token that the tokenizer appended, nor begin with two
beginning-of-sequence tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from april.images.store import NoImages
from april.rollout.trajectory.features import Feature, PromptImages
from april.rollout.trajectory.prompt import Prompt
from april.tasks.images import image_sources
from april.tasks.task import ChatTemplate, Messages, Problem


class Text(NamedTuple):
    """A prompt before it is tokenized."""

    text: str
    bare: bool
    """The tokenizer adds its special tokens: the text has none of its own."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns problems into prompts; the problem itself becomes the prompt's metadata.

    Args:
        tokenizer: Hugging Face tokenizer. Plain text gets the special tokens that the tokenizer puts before text,
            unless it begins with the beginning-of-sequence token.
        chat_template: see `ChatTemplate`.
        template_arguments: further arguments of the chat template, such as `enable_thinking` or tools.
        continue_assistant: continue the last turn of a conversation that ends with the assistant's.
        images: expands the placeholders of images; see `april.rollout.trajectory.features`.
    """

    tokenizer: Any
    chat_template: ChatTemplate = "auto"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    continue_assistant: bool = False
    images: PromptImages = field(default=NoImages("its encoder was given no image processor"))

    def __call__(self, problem: Problem) -> Prompt:
        """Encode one problem.

        Raises:
            ValueError: the prompt is empty, the chat template is missing or refuses the conversation, or the text
                cannot be tokenized.
        """
        [encoded] = self.batch([problem])
        if isinstance(encoded, ValueError):
            raise ValueError(f"problem {problem.id!r}: {encoded}")
        return encoded

    def batch(self, problems: Sequence[Problem]) -> Iterator[Prompt | ValueError]:
        """Yield each problem's prompt, or the reason why it has none; texts are tokenized together."""
        found: list[Text | Sequence[int] | ValueError] = [self._text(problem) for problem in problems]
        # A tokenizer takes add_special_tokens for a whole batch, hence one batch for each value.
        for bare in (True, False):
            texts = {i: text.text for i, text in enumerate(found) if isinstance(text, Text) and text.bare is bare}
            for i, token_ids in zip(texts, self._tokenized(list(texts.values()), bare), strict=True):
                found[i] = token_ids
        self.images.read_ahead(source for problem in problems for source in image_sources(problem.prompt))
        for problem, ids in zip(problems, found, strict=True):
            yield ids if isinstance(ids, ValueError) else self._prompt(problem, ids)  # type: ignore[arg-type]

    def _text(self, problem: Problem) -> Text | ValueError:
        prompt = problem.prompt
        if not prompt or not (problem.question.strip() or image_sources(prompt)):
            return ValueError("its prompt is empty")
        if isinstance(prompt, str) and self.chat_template != "always":
            bos = getattr(self.tokenizer, "bos_token", None)
            return Text(prompt, bare=not (bos and prompt.startswith(bos)))
        messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            if isinstance(self.images, NoImages) and (sources := image_sources(messages)):
                self.images.expand((), sources)  # before a template of a model without images sees them
            return Text(self._rendered(messages), bare=False)
        except ValueError as error:
            return error

    def _rendered(self, messages: Messages) -> str:
        if self.chat_template == "never":
            raise ValueError('it is a conversation, but chat_template = "never"; set it to "auto"')
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "it is a conversation, but the tokenizer has no chat template: use a chat model's tokenizer, or "
                "plain-text prompts without a system prompt"
            )
        arguments: dict[str, Any] = {"add_generation_prompt": True, **self.template_arguments}
        if messages[-1]["role"] == "assistant" and arguments["add_generation_prompt"]:
            if not self.continue_assistant:
                raise ValueError(
                    "the conversation ends with the assistant's turn, which would be closed and followed by another: "
                    "end it before that turn, or set task.continue_assistant = true to continue the turn"
                )
            arguments |= {"add_generation_prompt": False, "continue_final_message": True}
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        except Exception as error:  # a template may raise, or fail, in any way
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template refuses the conversation ({roles}): {' '.join(str(error).split())}"
            ) from None
        return text

    def _tokenized(self, texts: Sequence[str], bare: bool) -> Sequence[Sequence[int] | ValueError]:
        if len(texts) > 1:
            try:
                ids: Sequence[Sequence[int]] = self.tokenizer(list(texts), add_special_tokens=bare).input_ids
                return ids
            except Exception:  # one of them is at fault: find out which
                return [self._tokenized([text], bare)[0] for text in texts]
        try:
            return [self.tokenizer(text, add_special_tokens=bare).input_ids for text in texts]
        except Exception as error:
            return [ValueError(f"the tokenizer refuses its prompt: {type(error).__name__}: {error}")]

    def _prompt(self, problem: Problem, token_ids: Sequence[int]) -> Prompt | ValueError:
        if isinstance(problem.prompt, str) and self.chat_template != "always":
            token_ids = self._without_appended_eos(token_ids, problem.prompt)
        if not token_ids:
            return ValueError(f"the tokenizer makes no token of its prompt {problem.prompt!r}")
        features: tuple[Feature, ...] = ()
        if sources := image_sources(problem.prompt):
            try:
                token_ids, features = self.images.expand(token_ids, sources)
            except ValueError as error:
                return error
        metadata = {"prompt": problem.prompt, "answer": problem.answer, "metadata": dict(problem.metadata)}
        return Prompt(tuple(token_ids), problem.id, metadata, features=features)

    def _without_appended_eos(self, token_ids: Sequence[int], text: str) -> Sequence[int]:
        """Some tokenizers end every text with an end-of-sequence token; after it a policy would generate nothing."""
        tokenizer = self.tokenizer
        added = token_ids and token_ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token)
        return token_ids[:-1] if added else token_ids

    @property
    def unknown_token(self) -> int | None:
        """The token that stands for what the tokenizer does not know, where it has one for nothing else."""
        token: int | None = getattr(self.tokenizer, "unk_token_id", None)
        others = [getattr(self.tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")]
        return None if token in others else token


def check_template_arguments(arguments: Mapping[str, Any], tokenizer: Any) -> None:
    """Check that the chat template knows each of the recipe's arguments: a template ignores others silently.

    Raises:
        ValueError: there is no chat template, or it does not contain one of the names.
    """
    template = getattr(tokenizer, "chat_template", None)
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    for name in arguments:
        if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts):
            missing = f"does not read {name!r}" if template else "is missing"
            raise ValueError(f"template_arguments.{name}: the tokenizer's chat template {missing}; remove it")
