"""The parser of a command line, driven by rows of a flag table.

Manners it shares with vLLM's: ``--a_b`` equals ``--a-b``, unique prefixes, ``--no-x``,
``--flag=value``, ``1k``/``1K``, JSON values and dotted keys, ``-O2``, ``--config file.yaml``.
argparse does half of these, costs 6 ms to import and several more to fill with 250 flags, which
the engine's start would wait for.
"""

from __future__ import annotations

from hotstart.config.flags import IMPLEMENTED, NO_EFFECT, REFUSED, UNSET, Flag, Group, Positional
from hotstart.config.values import Json, Many, Switch, Text, parse_scalar
from hotstart.errors import ConfigError, HotstartError, raise_all

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class HelpWanted(Exception):  # noqa: N818  (not an error)
    """``--help`` or ``--help=WORD`` was met."""

    def __init__(self, command: Command, topic: str = "") -> None:
        self.command = command
        self.topic = topic
        super().__init__(topic)


class Arguments:
    """What a command line said."""

    __slots__ = ("given", "notes", "rest", "values")

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        """By the row's ``to``: the values given, and the defaults of rows that have their own."""
        self.given: dict[str, str] = {}
        """By the row's ``to``: the flag as spelled, for messages."""
        self.notes: list[str] = []
        """For the log, once it is set up."""
        self.rest: list[str] = []
        """Words after ``--``, for commands that take them."""


class Command:
    """A command: its rows, and how to read them.

    ``config_file`` is the ``to`` of the row that names a YAML file with further flags.
    """

    def __init__(
        self,
        name: str,
        summary: str,
        groups: Sequence[Group],
        *,
        positional: Positional | None = None,
        second: Positional | None = None,
        takes_rest: str = "",
        config_file: str = "",
    ) -> None:
        self.name = name
        self.summary = summary
        self.groups = groups
        self.positional = positional
        self.second = second
        """The argument behind it, of commands that need both."""
        self.takes_rest = takes_rest
        """What the words after ``--`` are, for ``--help``; empty: there are none."""
        self.config_file = config_file
        self.index: dict[str, tuple[Flag, bool]] = {}
        """Each accepted name; True: this name turns the switch off."""
        self.dotted: dict[str, Flag] = {}
        """Names that reach a row only when a dotted key follows."""
        for row in self.rows():
            self.dotted.update(dict.fromkeys(row.dotted_names, row))
            for name in row.names:
                self.index[name] = row, False
                if isinstance(row.kind, Switch) and name.startswith("--"):
                    self.index.setdefault(f"--no-{name[2:]}", (row, True))
        if positional is not None and positional.names:
            row = Flag(positional.names, IMPLEMENTED, Text())
            row.to = positional.to
            self.index.update(dict.fromkeys(positional.names, (row, False)))

    def rows(self) -> list[Flag]:
        """All rows, in the order of the table."""
        return [row for group in self.groups for row in group.rows]

    def parse(self, argv: Sequence[str]) -> Arguments:
        """Read a command line.

        Raises ``ConfigError``, or ``ProblemsFound`` with every problem there is, and
        :class:`HelpWanted`.
        """
        for word in argv:
            if not word.isascii() and any("\ud800" <= character <= "\udfff" for character in word):
                raise ConfigError(f"{word!a} is no text in UTF-8", expected="names and values in UTF-8")
        return _Reading(self).run(list(argv))

    def complete(self, name: str) -> str | ConfigError:
        """The full name that ``name`` is, or begins; or what is wrong with it."""
        if name in self.index:
            return name
        longer = [known for known in self.index if known.startswith(name)] if len(name) > 2 else []
        if not longer:
            return self._unknown(name)
        if len({self.index[known] for known in longer}) == 1:
            return longer[0]
        return ConfigError(
            f"{name} could be {_either(sorted(longer))}", expected="more letters of one of them"
        )

    def _unknown(self, name: str) -> ConfigError:
        from difflib import get_close_matches

        kind = [known for known in self.index if known.startswith("--") == name.startswith("--")]
        near = get_close_matches(name, kind, n=3, cutoff=0.6)
        hint = f"Did you mean {_either(near)}? " if near else ""
        return ConfigError(f"there is no flag {name}", advice=hint + _see_help(self))


class Use:
    """One appearance of a flag, on the command line or in a file."""

    __slots__ = ("origin", "row", "spelled", "subkey", "turns_off", "value", "words")

    def __init__(self, row: Flag, spelled: str, *, turns_off: bool = False, subkey: str = "") -> None:
        self.row = row
        self.spelled = spelled
        self.turns_off = turns_off
        self.subkey = subkey
        self.words: list[str] = []
        self.value: object = UNSET
        """What a file says, in place of ``words``."""
        self.origin = ""
        """File and line, in front of messages."""

    def __str__(self) -> str:
        subkey = f".{self.subkey}" if self.subkey else ""
        return f"{self.origin}{self.spelled}{subkey}"

    def shown(self) -> str:
        """The value as written, unless it is a secret."""
        text = " ".join(self.words) if self.value is UNSET else repr(self.value)
        return "***" if text and self.row.secret else text


class _Reading:
    """The state of one :meth:`Command.parse`."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.result = Arguments()
        self.problems: list[HotstartError] = []
        self.uses: list[Use] = []
        self.positionals: list[str] = []
        self.unsure = False
        """An unknown flag may have taken one of the positionals as its value, so do not count them."""

    def run(self, argv: list[str]) -> Arguments:
        self._split(argv)
        self._note_repetitions()
        for use in self._uses_of_file() + self.uses:
            self._apply(use)
        if self.command.positional is not None and self.command.second is not None:
            self._settle_both(self.command.positional, self.command.second)
        elif self.command.positional is not None:
            self._settle_positional(self.command.positional)
        elif self.positionals and not self.unsure:
            self._problem(f"unexpected {_listed(self.positionals)}", advice=_see_help(self.command))
        raise_all(self.problems)
        for row in self.command.rows():
            if row.default is not UNSET:
                self.result.values.setdefault(row.to, row.default)
        return self.result

    def _problem(self, found: str, *, expected: str = "", advice: str = "") -> None:
        self.problems.append(ConfigError(found, expected=expected, advice=advice))

    def _split(self, words: list[str]) -> None:
        """Cut the command line into uses of flags and words that stand alone."""
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if word == "--":
                (self.result.rest if self.command.takes_rest else self.positionals).extend(words[at:])
                return
            if not _is_flag(word):
                self.positionals.append(word)
                continue
            use, value = self._use(word)
            if use is None:
                continue
            if value is not None:
                use.words.append(value)
            elif use.subkey or not isinstance(use.row.kind, Switch):
                end = len(words) if use.row.kind.many else min(at + 1, len(words))
                while at < end and not _is_flag(words[at]):
                    use.words.append(words[at])
                    at += 1
            self.uses.append(use)

    def _use(self, word: str) -> tuple[Use | None, str | None]:
        """``--a_b.c=d`` as a use of ``--a-b`` with the subkey ``c``, and the value ``d``."""
        head, equals, value = word.partition("=")
        name, _, subkey = head.partition(".")
        name = name.replace("_", "-")
        if name in ("--help", "-h"):
            raise HelpWanted(self.command, value)
        index = self.command.index
        if name not in index and not name.startswith("--") and name[:2] in index and not equals:
            name, equals, value = name[:2], "=", word[2:]  # -O2
            subkey = ""
        dotted = self.command.dotted.get(name) if subkey else None
        full = name if dotted else self.command.complete(name)
        if isinstance(full, ConfigError):
            self.problems.append(full)
            self.unsure = True
            return None, None
        row, turns_off = (dotted, False) if dotted else index[full]
        if subkey and not isinstance(row.kind, Json):
            self._problem(f"{head} sets a key, but {full} has no keys", expected=row.kind.expects)
            self.unsure = True
            return None, None
        return Use(row, full, turns_off=turns_off, subkey=subkey), value if equals else None

    def _note_repetitions(self) -> None:
        seen: dict[Flag, int] = {}
        for use in self.uses:
            if not use.subkey and use.row.to != self._positional_to() and not use.row.kind.repeats:
                seen[use.row] = seen.get(use.row, 0) + 1
        for row, count in seen.items():
            if count > 1:
                self.result.notes.append(f"{row.name} is given {count} times: the last one counts")

    def _positional_to(self) -> str:
        return self.command.positional.to if self.command.positional else ""

    def _uses_of_file(self) -> list[Use]:
        """The flags of ``--config FILE``: they come first, so that the command line wins."""
        named = [
            use for use in self.uses if self.command.config_file and use.row.to == self.command.config_file
        ]
        if not named or not named[-1].words:
            return []
        if len(named) > 1:
            files = [" ".join(use.words) for use in named]
            self._problem(f"{named[0]} is given {len(named)} times: {_listed(files)}", expected="one file")
            return []
        from hotstart.config.file import read_uses

        uses, problems = read_uses(self.command, named[-1].words[-1])
        self.problems.extend(problems)
        return uses

    def _apply(self, use: Use) -> None:
        """Check one use and set its value."""
        row = use.row
        if row.to and row.to == self._positional_to():
            self._apply_positional(use)
            return
        if reason := self._refused_unread(use):
            self._refuse(use, *reason)
            return
        try:
            value = self._value(use)
        except ValueError:
            shown = use.shown()
            found = f"{use} is {shown}" if shown else f"{use} has no value"
            near = row.kind.nearest(use.words[-1] if use.words else str(use.value))
            advice = f"Did you mean {near}?" if near else ""
            self._problem(found, expected=row.kind.expects, advice=advice)
            return
        if reason := row.refusal(value):
            self._refuse(use, *reason)
            return
        if row.verdict is NO_EFFECT:
            self.result.notes.append(f"{use} has no effect: {row.because}")
        if row.to:
            self._set(use, value)

    def _refused_unread(self, use: Use) -> tuple[str, str] | None:
        """A refusal that does not depend on the value being well formed."""
        row = use.row
        if row.verdict is REFUSED and not row.only and not isinstance(row.kind, Switch):
            return row.because, row.instead
        return row.reasons.get(use.words[-1] if use.words else str(use.value))

    def _refuse(self, use: Use, because: str, instead: str) -> None:
        value = "" if isinstance(use.row.kind, Switch) else use.shown()
        advice = instead[:1].upper() + instead[1:]
        self._problem(f"{use}{' ' if value else ''}{value} is refused: {because}", advice=advice)

    def _value(self, use: Use) -> object:
        kind = use.row.kind
        if use.value is not UNSET:
            value = use.value if use.subkey else kind.convert(use.value)
        elif isinstance(kind, Switch) and not use.words:
            value = True
        elif not use.words:
            raise ValueError
        elif use.subkey:
            value = parse_scalar(use.words[-1])
        elif isinstance(kind, Many):
            value = kind.parse_all(use.words)
        else:
            value = kind.parse(use.words[-1])
        return (not value) if use.turns_off else value

    def _set(self, use: Use, value: object) -> None:
        to = use.row.to
        self.result.given[to] = use.spelled
        if use.row.kind.repeats and isinstance(value, tuple):
            value = (*self.result.values.get(to, ()), *value)
        if not use.subkey:
            self.result.values[to] = value
            return
        node = self.result.values[to] = dict(self.result.values.get(to, {}))
        *outer, last = use.subkey.split(".")
        for key in outer:
            inner = node.get(key)
            node[key] = node = dict(inner) if isinstance(inner, dict) else {}
        if last.endswith("+"):
            last = last[:-1]
            before = node.get(last, [])
            value = [*(before if isinstance(before, list) else [before]), value]
        node[last] = value

    def _apply_positional(self, use: Use) -> None:
        positional = self.command.positional
        assert positional is not None
        value = use.words[-1] if use.words else "" if use.value is UNSET else str(use.value)
        if not value:
            self._problem(f"{use} has no value", expected=positional.help)
        elif use.origin:
            self.result.values.setdefault(positional.to, value)
        else:
            self.positionals.append(value)
            self.result.notes.append(
                f"{use.spelled} {value} is read as the argument: `hotstart {self.command.name} {value}`"
            )

    def _settle_both(self, first: Positional, second: Positional) -> None:
        if self.unsure or len(self.positionals) == 2:
            self.result.values.update(zip((first.to, second.to), self.positionals, strict=False))
            return
        given = _listed(self.positionals) if self.positionals else "nothing"
        self._problem(
            f"{given} is given, which is {len(self.positionals)} of 2 arguments",
            expected=f"{first.metavar}, {first.help}; and {second.metavar}, {second.help}",
            advice=f"Put both right after the command: `hotstart {self.command.name} {first.metavar} "
            f"{second.metavar} --flag …`",
        )

    def _settle_positional(self, positional: Positional) -> None:
        different = list(dict.fromkeys(self.positionals))
        if self.unsure:
            return
        if len(different) > 1:
            self._problem(
                f"{len(different)} {positional.metavar} arguments: {_listed(different)}",
                expected=f"one {positional.metavar}",
                advice=positional.only_one,
            )
        elif different:
            self.result.values[positional.to] = different[0]
        elif positional.required and positional.to not in self.result.values and not self.problems:
            name = positional.metavar
            self._problem(
                f"no {name} is given",
                expected=positional.help,
                advice=f"Put it right after the command: `hotstart {self.command.name} {name} --flag …`",
            )


def _is_flag(word: str) -> bool:
    """``-1``, ``-0.5`` and ``-`` are values."""
    return len(word) > 1 and word[0] == "-" and not (word[1].isdigit() or word[1] == ".")


def _either(words: Sequence[str], most: int = 8) -> str:
    if len(words) > most:
        return f"{', '.join(words[:most])} or one of {len(words) - most} more"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _see_help(command: Command) -> str:
    return f"`hotstart {command.name} --help` lists the flags"
