"""The flag table as text for a terminal. Imports what it likes: nobody waits for an engine."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator

from hotstart.config.command import Command
from hotstart.config.flags import IMPLEMENTED, NO_EFFECT, REFUSED, UNSET, Flag
from hotstart.config.values import Switch

_LEFT = 34
"""Column where explanations begin."""


def help_text(command: Command, topic: str = "", *, width: int | None = None) -> str:
    """``--help``, or with a topic the rows (of all verdicts) whose name or heading contains it."""
    width = width or terminal_width()
    word = topic.lower().replace("_", "-").lstrip("-")
    lines = [] if topic else [*_usage(command, width), ""]
    hidden = 0
    for group in command.groups:
        whole = word in group.title.lower()
        rows = [row for row in group.rows if whole or any(word in name for name in row.names)]
        shown = rows if topic else [row for row in rows if row.verdict is IMPLEMENTED]
        hidden += sum(len(row.names) for row in rows if row not in shown)
        if shown:
            lines += [f"{group.title}:", *(line for row in shown for line in _row(row, width)), ""]
    if topic and not lines:
        return f"No flag or heading of `hotstart {command.name}` contains {topic!r}.\n"
    if hidden:
        more = (
            f"{hidden} more flags known from vLLM are refused or have no effect, each with its reason: "
            f"`hotstart {command.name} --help=refused`, `--help=effect`, or --help= and a word of the name."
        )
        lines += textwrap.wrap(more, width)
    return "\n".join(lines).rstrip() + "\n"


def terminal_width() -> int:
    """Columns to fill: those of the terminal, at most 100."""
    try:
        columns = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size().columns
    except (OSError, ValueError):
        columns = 100
    return max(60, min(columns, 100))


def default_text(row: Flag) -> str:
    """The default as one would type it; empty where there is none worth showing."""
    value = _default(row)
    if value is UNSET or value is None or value in ((), {}, ""):
        return ""
    if isinstance(row.kind, Switch):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def only_text(row: Flag) -> str:
    """``, but 1 is accepted`` for a refused row of which some values are not."""
    if not row.only:
        return ""
    return f", but {only_values(row)} {'is' if len(row.only) == 1 else 'are'} accepted"


def only_values(row: Flag) -> str:
    """The values that are not refused: ``auto and none``."""
    values = [
        " ".join(value)
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else f"{value}"
        for value in row.only
    ]
    return " and ".join(values)


def _default(row: Flag) -> object:
    if row.default is not UNSET or "." not in row.to:
        return row.default
    from hotstart.config.settings import SECTIONS

    section, _, field = row.to.partition(".")
    for info in _fields(SECTIONS[section]):
        if info[0] == field:
            return info[1]
    return UNSET


def _fields(struct: type) -> Iterator[tuple[str, object]]:
    import msgspec

    for info in msgspec.structs.fields(struct):
        yield info.name, None if info.default is msgspec.NODEFAULT else info.default


def _usage(command: Command, width: int) -> list[str]:
    positional = command.positional
    words = ["hotstart", command.name]
    if positional is not None:
        words.append(positional.metavar if positional.required else f"[{positional.metavar}]")
    if command.second is not None:
        words.append(command.second.metavar)
    words.append("[--flag [value] …]")
    if command.takes_rest:
        words.append("[-- …]")
    lines = [f"usage: {' '.join(words)}", "", *textwrap.wrap(command.summary, width)]
    entries = [(each.metavar, each.help) for each in (positional, command.second) if each is not None]
    if command.takes_rest:
        entries.append(("-- …", command.takes_rest))
    return [*lines, "", *(line for left, right in entries for line in _entry(left, right, width))]


def _row(row: Flag, width: int) -> list[str]:
    names = ", ".join(row.names)
    left = f"{names} {row.kind.metavar}".rstrip()
    default = default_text(row)
    if isinstance(row.kind, Switch) and default == "on":
        left = f"--no-{row.name[2:]}"
    text = row.help
    if row.verdict is NO_EFFECT:
        text = f"no effect: {row.because}"
    elif row.verdict is REFUSED:
        text = f"refused: {row.because}{only_text(row)}" + (f"; {row.instead}" if row.instead else "")
    elif isinstance(row.kind, Switch) and default == "on":
        text = f"turn off: {text}"
    elif row.only:
        text += f"; others than {only_values(row)} are refused: {row.because}"
    elif default and not isinstance(row.kind, Switch):
        text = f"{text} [{default}]"
    return _entry(left, text, width)


def _entry(left: str, right: str, width: int) -> list[str]:
    wrapped = textwrap.wrap(right, width - _LEFT) or [""]
    if len(left) <= _LEFT - 4:
        return [f"  {left:<{_LEFT - 2}}{wrapped[0]}", *(" " * _LEFT + line for line in wrapped[1:])]
    return [f"  {left}", *(" " * _LEFT + line for line in wrapped)]
