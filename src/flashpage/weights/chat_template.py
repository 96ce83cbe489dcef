"""Renders a model's Jinja chat template over messages, as transformers does; knows no token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from flashpage.errors import CheckpointError, RequestError, require


class ChatTemplate:
    """A compiled template.

    It comes with the checkpoint and so from strangers: it runs in Jinja's immutable sandbox.

    Args:
        source: the Jinja text.
        special_tokens: what the template may refer to: "bos_token" -> "<s>" and so on.

    Raises:
        CheckpointError: the text is not valid Jinja, or nested too deeply.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        require("jinja2", "engine")
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # Templates are written for these two settings: block lines leave no trace in the text.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # of Jinja, and of Python, which compiles what Jinja writes
            raise CheckpointError(f"the chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of the conversation, with the opening of the model's reply if asked for.

        Raises:
            RequestError: a message without "role" or "content", or one that the template refuses.
        """
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                    raise RequestError(
                        f"messages[{index}] must be a dict with a string {key!r}, got {message!r}"
                    )
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # the template's expressions can raise anything
            raise RequestError(f"the chat template refuses these messages: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
