"""Chat templates render as in transformers, in a sandbox, and fail in our words."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from flashpage.errors import CheckpointError, RequestError
from flashpage.weights.chat_template import ChatTemplate

CHAT = [
    {"role": "system", "content": "Be brief. <b>&amp;"},
    {"role": "user", "content": "  Hi \n"},
    {"role": "assistant", "content": "Ho é"},
]
TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}\n[{{ m.role }}] {{ m['content'] | trim }}{% endfor %}",
    """{%- for message in messages %}
    {%- if loop.first and message['role'] == 'system' %}
        {{- '<<SYS>>' + message['content'] + eos_token }}
    {%- else %}
        {% if message.role == 'assistant' %}
    A: {{ message.content }}
        {% endif %}
    {%- endif %}
    {% endfor %}
    {%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}""",
    "{{ messages | tojson }}{{ {'b': 1, 'a': 'é<'} | tojson(indent=2) }}",
    "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 2 %}{% endfor %}{{s.n}}",
    "{% if tools %}tools{% else %}none{% endif %}{{ '%d' % strftime_now('%Y') | int > '2000' }}",
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_equals_transformers(source: str, add_generation_prompt: bool) -> None:
    expected, _ = render_jinja_template(
        [CHAT],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        **SPECIAL,
    )
    assert ChatTemplate(source, SPECIAL).render(CHAT, add_generation_prompt) == expected[0]


def test_refusal_of_the_template() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    with pytest.raises(RequestError, match="user first"):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    ],
)
def test_nested_too_deeply(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template is not valid"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / messages | length - 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ strftime_now(5) }}",
    ],
)
def test_failure_of_an_expression(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}])


def test_invalid_template() -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
    ],
)
def test_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": ["x"]}, "content"),
        ("x", "role"),
    ],
)
def test_bad_messages_name_their_index(message: object, word: str) -> None:
    with pytest.raises(RequestError, match=rf"messages\[1\].*{word}"):
        ChatTemplate("{{ messages }}", {}).render([CHAT[0], message])
