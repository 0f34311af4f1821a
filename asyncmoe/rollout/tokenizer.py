"""Convert between text and token ids with the tokenizer stored beside the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from asyncmoe.errors import DataError, together
from asyncmoe.imports import uncollected
from asyncmoe.models import load_hf_config
from asyncmoe.models.hf_folder import pointers, tokenizer_faults, tokenizer_settings
from asyncmoe.models.shape import positive
from asyncmoe.rollout import chat_template

_PLAIN = "TokenizersBackend"
"""The `tokenizer_class` that transformers 5.0 and later writes for a tokenizer contained entirely in its tokenizer.json."""
Mappings = Sequence[Mapping[str, Any]]
_SAID = "zqxvsaid"
"""Placeholder for an assistant message if only the text after it matters."""


class Tokenizer:
    """A Hugging Face tokenizer, and the size of the model's vocabulary, which limits its ids.

    Args:
        variables: variables of the chat template, as task.chat_template_kwargs.

    Attributes:
        eos: id of the end-of-sequence token, which ends a response.
        vocabulary: number of token ids the model knows.
        positions: maximum tokens of a conversation; None if the model's configuration does not say.

    Raises:
        DataError: `path` has no tokenizer, or the tokenizer has Python code of its own while `trust_remote_code` is false, needs a package
            that is not installed, has no end-of-sequence token, or has ids that the model does not know and that crash an engine; or its
            chat template does not use one of `variables`.
    """

    def __init__(self, path: Path, trust_remote_code: bool = False, variables: Mapping[str, Any] | None = None) -> None:
        hf = load_hf_config(path)
        if faults := [*pointers(path), *tokenizer_faults(path)]:
            raise together(faults)
        settings = tokenizer_settings(path)
        # AutoTokenizer imports torch and all of generation, which would delay the engines' start by seconds.
        plain = settings.get("tokenizer_class") == _PLAIN and "auto_map" not in settings
        with uncollected():
            import transformers

            loader = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
        try:
            self._tokenizer: Any = loader.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            untrusted = "auto_map" in settings and not trust_remote_code
            hint = "model.trust_remote_code=true runs the Python code beside the tokenizer: read that code first" if untrusted else None
            raise DataError("model.path", got=" ".join(str(error).split())[:300], expected=f"a tokenizer in {path}", hint=hint) from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"tokenizer in {path}", got="no eos_token", expected="an end-of-sequence token; responses end with it")
        self.eos: int = self._tokenizer.eos_token_id
        self.vocabulary, self.positions = positive(hf, "vocab_size"), hf.get("max_position_embeddings")
        if (largest := max(self._tokenizer.get_vocab().values(), default=0)) >= self.vocabulary:
            expected = f"ids below the model's vocab_size {self.vocabulary}"
            raise DataError(f"tokenizer in {path}", got=f"token {largest}", expected=expected, hint="use the tokenizer of this model")
        self._variables = variables or {}
        if (unused := self.unused(self._variables)) is not None:
            raise DataError("task.chat_template_kwargs", got=unused, expected="variables that the model's chat template uses")

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, with nothing added before or after it. A lone surrogate becomes U+FFFD."""
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return tuple(self._tokenizer.encode(whole, add_special_tokens=False))

    def render(self, messages: Mappings, tools: Mappings = (), *, asked: bool = True, variables: Mapping[str, Any] | None = None) -> str:
        """Render a conversation with the chat template.

        Args:
            messages: each with "role", "content" and any other key that the template knows.
            tools: OpenAI's function schemas.
            asked: add the prompt for the assistant's next message.
            variables: variables of the template, in addition to the tokenizer's own.

        Raises:
            DataError: the tokenizer has no chat template, or the template cannot render the conversation.
        """
        if self._tokenizer.chat_template is None:
            hint = "set task.chat_template=false or use a model with one"
            raise DataError("task.chat_template", got="none in the tokenizer", expected="a chat template", hint=hint)
        from jinja2 import TemplateError

        given = [dict(message) for message in messages], [dict(tool) for tool in tools] or None
        told = {**self._variables, **(variables or {})}
        try:
            return str(self._tokenizer.apply_chat_template(given[0], tools=given[1], tokenize=False, add_generation_prompt=asked, **told))
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError("chat template", got=str(error)[:300], expected="messages that it can render") from error

    def unused(self, variables: Iterable[str]) -> str | None:
        """Return the first of these variables that the chat template does not use, or None."""
        return next((name for name in variables if name not in chat_template.names(self._tokenizer.chat_template)), None)

    def lacks(self, kind: str) -> bool:
        """Return whether the chat template leaves out a kind of content; see `chat_template.lacks`."""
        return chat_template.lacks(kind, str(self._tokenizer.chat_template), self.render)

    def check(self, messages: Mappings, begin: int = 0, where: str = "messages") -> None:
        """Refuse messages from which the chat template would leave something out.

        Args:
            begin: number of messages before them in their conversation.
            where: name of the conversation, for messages.

        Raises:
            DataError: names the message and what is lost.
        """
        for index, message in enumerate(messages, begin):
            for kind in filter(self.lacks, chat_template.kinds(message, index == 0)):
                raise DataError(f"{where}[{index}]", got=f"{kind}, which the chat template leaves out", expected="content that it renders")

    def between(self, observations: Sequence[str], ids: Sequence[str | None] = ()) -> tuple[int, ...]:
        """Return the token ids of tool answers: from the end of an assistant's turn, whose last token was sampled, to its next turn.

        Args:
            ids: ids of their calls, as the policy wrote them; None or missing: it wrote none.

        Raises:
            DataError: the chat template does not support tool answers, or leaves them or the turn before them out.
        """
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        calls = zip_longest(observations, ids)
        answers = [{"role": "tool", "content": text, "tool_call_id": call or chat_template.CALL_ID} for text, call in calls]
        self.check(answers, len(messages), "tool answers")
        _, said, added = self.render([*messages, *answers]).partition(_SAID)
        if not said:
            raise DataError("chat template", got="one that drops the turn before tool answers", expected="a template that keeps it")
        return self.encode(added.removeprefix(str(self._tokenizer.eos_token)))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens (such as the end of the sequence)."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included, unchanged: no white space is cleaned up."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
