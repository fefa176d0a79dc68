"""From the messages of a request to what a chat template sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hotstart.frontend.errors import ApiError
from hotstart.frontend.protocol.chat import ContentPart, Message, ToolCall
from hotstart.frontend.start import Text

if TYPE_CHECKING:  # jinja2 is imported only where there is a template
    from hotstart.frontend.chat_template import ChatTemplate

_TEXT_PARTS = ("text", "input_text", "output_text")


def render_prompt(
    text: Text,
    messages: list[Message],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: dict[str, object],
) -> str:
    """The prompt of a conversation. Raises :class:`ApiError` 400 with what to change."""
    template = text.template
    if template is None:
        raise ApiError(400, text.no_template)
    if add_generation_prompt and continue_final_message:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt exclude each other; set one to false.",
            param="continue_final_message",
        )
    plain = template_messages(messages, template)
    try:
        return template.render(
            plain,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=template_kwargs,
        )
    except ValueError as error:  # TemplateRefusedError is one
        raise ApiError(400, f"{error}.", param="messages") from None


def template_messages(messages: list[Message], template: ChatTemplate) -> list[dict[str, Any]]:
    """Plain dictionaries, with content as text or as parts, whichever the template expects."""
    plain: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        role = message.role
        if role == "developer" and not template.knows_developer:
            role = "system"
        entry: dict[str, Any] = {"role": role, "content": _content(message, i, template.content_format)}
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            entry["tool_calls"] = [
                _tool_call(call, f"messages[{i}].tool_calls[{j}]")
                for j, call in enumerate(message.tool_calls)
            ]
        reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
        if reasoning is not None:
            entry["reasoning_content"] = entry["reasoning"] = reasoning
        plain.append(entry)
    return plain


def _content(message: Message, i: int, content_format: str) -> str | list[dict[str, str]]:
    content = message.content
    if isinstance(content, str):
        return content if content_format == "string" else [{"type": "text", "text": content}]
    texts = [_part(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content or ())]
    if content_format == "string":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part(part: ContentPart, where: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in _TEXT_PARTS and part.type != "refusal":
        raise ApiError(
            400, f"{where}: parts of type {part.type!r} are not supported, only text.", param=f"{where}.type"
        )
    if text is None:
        raise ApiError(400, f"{where}.text: this field is required.", param=f"{where}.text")
    return text


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates expect arguments as an object, OpenAI sends them as JSON text."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        param = f"{where}.function.arguments"
        raise ApiError(400, f"{param}: not valid JSON: {error}.", param=param) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type or "function", "function": function}
