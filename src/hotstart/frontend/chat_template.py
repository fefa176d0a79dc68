"""Chat templates, rendered as transformers renders them.

Templates come with models and are untrusted: they run in jinja2's immutable sandbox and see plain
data only. Environment, filters and ``continue_final_message`` follow ``apply_chat_template``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from hotstart.errors import ConfigError, HotstartError, ModelError

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateRefusedError(ValueError):
    """The template, or its rendering, cannot take this conversation."""


class ChatTemplate:
    """A compiled template.

    ``content_format`` is ``string`` (content is text) or ``openai`` (content is a list of parts);
    ``auto`` looks at what the template does with it.
    """

    def __init__(
        self,
        source: str,
        *,
        origin: str,
        special_tokens: Mapping[str, str] | None = None,
        content_format: str = "auto",
        from_flag: bool = False,
    ) -> None:
        self.origin = origin
        self.knows_developer = "developer" in source
        """Whether the template mentions the role that replaced ``system``."""
        self._special_tokens = dict(special_tokens or {})
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise _broken(error, origin, from_flag) from None
        self.content_format = _detect_format(tree) if content_format == "auto" else content_format

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text. Raises :class:`TemplateRefusedError` with the template's own words."""
        if continue_final_message:
            messages = _with_tag(messages)
        values = {**self._special_tokens, "tools": None, "documents": None, **(extra or {})}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text: str = self._template.render(values)
        except RecursionError:
            raise TemplateRefusedError(
                "The chat template recurses without end on this conversation"
            ) from None
        except Exception as error:  # the template is somebody else's program, and its input a client's
            raise TemplateRefusedError(f"The chat template refused the conversation: {error}") from None
        return _cut_at_tag(text) if continue_final_message else text


def _with_tag(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUE
    elif isinstance(content, list) and content:
        last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE}]
    else:
        raise TemplateRefusedError("continue_final_message needs a final message with text")
    return [*messages[:-1], last]


def _cut_at_tag(text: str) -> str:
    at = text.rfind(_CONTINUE.strip())
    if at < 0:
        raise TemplateRefusedError(
            "continue_final_message: the template leaves the final message out of the prompt"
        )
    kept = text[:at]
    # Without the tag's trailing space the template trims contents, so the text before it is trimmed too.
    return kept if text.startswith(_CONTINUE, at) else kept.rstrip()


def _broken(error: jinja2.TemplateSyntaxError, origin: str, from_flag: bool) -> HotstartError:
    found = f"The chat template in {origin} is broken at line {error.lineno}: {error.message}"
    if from_flag:
        return ConfigError(found, expected="a jinja2 template", advice="Correct what --chat-template names")
    return ModelError(
        found,
        expected="a jinja2 template",
        advice="Correct the file, or pass another one with --chat-template",
    )


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it only passes them on."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which models never saw in training.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _detect_format(tree: jinja2.nodes.Template) -> str:
    """``openai`` when the template loops over a message's content, ``string`` otherwise."""
    holders = {"content"}
    for assign in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name) and _is_content(assign.node, holders):
            holders.add(assign.target.name)
    loops = tree.find_all(jinja2.nodes.For)
    return "openai" if any(_is_content(loop.iter, holders) for loop in loops) else "string"


def _is_content(node: jinja2.nodes.Node, holders: set[str]) -> bool:
    """Whether an expression is a message's content, or a variable that was set to one."""
    if isinstance(node, jinja2.nodes.Filter):
        return node.node is not None and _is_content(node.node, holders)
    if isinstance(node, jinja2.nodes.Getattr):
        return bool(node.attr == "content")
    if isinstance(node, jinja2.nodes.Getitem):
        if isinstance(node.arg, jinja2.nodes.Const):
            return bool(node.arg.value == "content")
        return isinstance(node.arg, jinja2.nodes.Slice) and _is_content(node.node, holders)
    return isinstance(node, jinja2.nodes.Name) and node.name in holders
