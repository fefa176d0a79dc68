"""Prompts are rendered as transformers renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from hotstart.checkpoint.base import ModelFiles
from hotstart.config.settings import Config, ModelConfig
from hotstart.errors import ConfigError, HotstartError, ModelError
from hotstart.frontend.chat_template import ChatTemplate, TemplateRefusedError
from hotstart.frontend.start import load_text

TALK = [
    {"role": "system", "content": "Be <brief> & clear."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi "},
]
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}",
    "blocks": """
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- bos_token + message.content + eos_token }}
    {%- else %}
    {{ message.role }}: {{ message.content | trim }}
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
assistant:
{%- endif %}""",
    "loop controls": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "namespace": "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = 1 %}{% endfor %}{{ s.n }}",
    "tools": "{% if tools %}tools{% else %}none{% endif %}{{ thinking | default('unset') }}",
}


def theirs(template: str, **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [TALK], chat_template=template, bos_token="<s>", eos_token="</s>", **options
    )
    return str(rendered[0])


def ours(template: str, talk: list[dict[str, Any]] | None = None, **options: Any) -> str:
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    compiled = ChatTemplate(template, origin="test", special_tokens=specials)
    return compiled.render(talk or TALK, **options)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_transformers_renders(name: str, add_generation_prompt: bool) -> None:
    expected = theirs(TEMPLATES[name], add_generation_prompt=add_generation_prompt)
    assert ours(TEMPLATES[name], add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize("name", ["plain", "blocks"])
def test_continues_the_final_message_as_transformers_does(name: str) -> None:
    expected = theirs(TEMPLATES[name], continue_final_message=True)
    assert ours(TEMPLATES[name], add_generation_prompt=False, continue_final_message=True) == expected


def test_keyword_arguments_reach_the_template() -> None:
    assert ours(TEMPLATES["tools"], extra={"thinking": "off"}) == "noneoff"


def test_strftime_now_gives_the_date() -> None:
    assert ours("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('only two roles') }}", "only two roles"),
        ("{{ messages[0].missing.deeper }}", "has no attribute 'missing'"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ '{5}'.format(messages) }}", "out of range"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_what_the_template_refuses_is_reported_in_its_words(template: str, words: str) -> None:
    with pytest.raises(TemplateRefusedError, match=words):
        ours(template)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATES["plain"], "string"),
        (
            "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p }}{% endfor %}{% endfor %}",
            "openai",
        ),
    ],
)
def test_detects_whether_content_is_text_or_parts(template: str, expected: str) -> None:
    assert ChatTemplate(template, origin="test").content_format == expected


def test_a_broken_template_of_the_model_is_a_model_error_with_file_and_line(files: ModelFiles) -> None:
    broken = msgspec.structs.replace(files, chat_template="{% if x %}\n{{ y }")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is broken at line 2"):
        load_text(broken, Config(model=ModelConfig(model="tiny")))


def test_a_broken_template_of_the_flag_is_a_configuration_error(files: ModelFiles) -> None:
    config = Config(model=ModelConfig(model="tiny", chat_template="{% endfor %}"))
    with pytest.raises(ConfigError, match="--chat-template is broken at line 1"):
        load_text(files, config)


def test_a_template_file_that_is_absent_is_a_configuration_error(files: ModelFiles) -> None:
    config = Config(model=ModelConfig(model="tiny", chat_template="no-such-file.jinja"))
    with pytest.raises(ConfigError, match=r"no-such-file\.jinja cannot be read"):
        load_text(files, config)


def test_a_template_file_without_an_end_is_a_configuration_error(files: ModelFiles) -> None:
    config = Config(model=ModelConfig(model="tiny", chat_template="/dev/zero"))
    with pytest.raises(ConfigError, match="--chat-template /dev/zero cannot be read: it does not end"):
        load_text(files, config)


def test_all_problems_of_the_text_side_are_reported_together(files: ModelFiles) -> None:
    broken = msgspec.structs.replace(files, tokenizer_json=None, chat_template="{% if %}")
    with pytest.raises(HotstartError, match=r"no tokenizer in .* is broken at line 1"):
        load_text(broken, Config(model=ModelConfig(model="tiny")))


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_template_of_the_flag_is_a_configuration_error(
    files: ModelFiles, tmp_path: Path, text: str
) -> None:
    """As from ``--chat-template <(a command that fails)``."""
    path = tmp_path / "empty.jinja"
    path.write_text(text)
    config = Config(model=ModelConfig(model="tiny", chat_template=str(path)))
    with pytest.raises(ConfigError, match=r"--chat-template .*empty\.jinja is empty"):
        load_text(files, config)


def test_an_empty_template_of_the_model_counts_as_none_and_is_warned_of(files: ModelFiles) -> None:
    without = msgspec.structs.replace(files, chat_template=None, empty_templates=("chat_template.jinja",))
    text = load_text(without, Config(model=ModelConfig(model="tiny")))
    assert text.template is None
    assert text.warnings == ("the chat template in chat_template.jinja is empty: it counts as none",)


def test_a_tokenizer_without_tokens_for_ordinary_text_is_warned_of(files: ModelFiles, tmp_path: Path) -> None:
    path = str(tmp_path / "tokenizer.json")
    model = tokenizers.models.WordLevel({"hello": 0}, unk_token="<unk>")
    tokenizers.Tokenizer(model).save(path)
    text = load_text(
        msgspec.structs.replace(files, tokenizer_json=path, tokenizer_config=None),
        Config(model=ModelConfig(model="tiny")),
    )
    assert any("cannot encode ordinary text" in warning for warning in text.warnings)
