"""What a row of the flag table is.

A row has one of three verdicts, and every flag that vLLM's ``serve`` knows should have one:

- *implemented*: its value goes to a field of :mod:`hotstart.config.settings`;
- *accepted with no effect*: one log line at start says why. Never a flag that would change the
  answer, the bytes read, the devices, the memory or the security;
- *refused*: an error that names the flag, the reason and the way out.

The parser, ``--help``, the keys of ``--config`` files and ``docs/flags.md`` are views of the rows.
"""

from __future__ import annotations

from hotstart.config.values import Kind, Switch

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

IMPLEMENTED = "implemented"
NO_EFFECT = "accepted with no effect"
REFUSED = "refused"

SWITCH = Switch()
UNSET = object()


class Flag:
    """One row. Made by :func:`flag`, :func:`no_effect` and :func:`refused`."""

    __slots__ = (
        "because",
        "default",
        "dotted_names",
        "help",
        "instead",
        "kind",
        "names",
        "only",
        "reasons",
        "secret",
        "to",
        "verdict",
    )

    def __init__(self, names: tuple[str, ...], verdict: str, kind: Kind) -> None:
        self.names = names
        self.verdict = verdict
        self.kind = kind
        self.to = ""
        """Field of the settings, such as ``http.port``; the key of the parsed value."""
        self.help = ""
        self.default: object = UNSET
        """Only where no field of the settings carries it."""
        self.because = ""
        self.instead = ""
        self.only: Collection[object] = ()
        """The values that are not refused; empty: all, or, for a refused row, none."""
        self.reasons: Mapping[str, tuple[str, str]] = {}
        """Values that are refused for a reason of their own: ``(because, instead)``."""
        self.dotted_names: tuple[str, ...] = ()
        """Further names that reach this row when a dotted key follows: ``-O.key``."""
        self.secret = False
        """The value never reaches a log or an error."""

    @property
    def name(self) -> str:
        """The name that messages use."""
        return self.names[0]

    def refusal(self, value: object) -> tuple[str, str] | None:
        """``(because, instead)`` when this value is refused, else None."""
        if self.verdict is REFUSED and isinstance(self.kind, Switch) and value is False:
            return None
        if self.verdict is REFUSED or self.only:
            return None if value in self.only else (self.because, self.instead)
        return None


def flag(
    *names: str,
    to: str,
    help: str,
    kind: Kind = SWITCH,
    default: object = UNSET,
    only: Collection[object] = (),
    reasons: Mapping[str, tuple[str, str]] | None = None,
    because: str = "",
    instead: str = "",
    secret: bool = False,
) -> Flag:
    """An implemented row. With ``only``, other values are refused ``because`` …, ``instead`` …."""
    row = Flag(names, IMPLEMENTED, kind)
    row.to, row.help, row.default, row.secret = to, help, default, secret
    row.only, row.reasons, row.because, row.instead = only, reasons or {}, because, instead
    return row


def no_effect(
    *names: str, because: str, kind: Kind = SWITCH, to: str = "", dotted_names: tuple[str, ...] = ()
) -> Flag:
    """A row that is checked and then only logged: ``--x has no effect: because``."""
    row = Flag(names, NO_EFFECT, kind)
    row.because, row.to, row.dotted_names = because, to, dotted_names
    return row


def refused(
    *names: str, because: str, instead: str = "", kind: Kind = SWITCH, only: Collection[object] = ()
) -> Flag:
    """A row whose values are refused, but for ``only`` and for a switch turned off."""
    row = Flag(names, REFUSED, kind)
    row.because, row.instead, row.only = because, instead, only
    return row


class Group:
    """Rows under one heading of ``--help`` and of the docs page."""

    __slots__ = ("rows", "title")

    def __init__(self, title: str, *rows: Flag) -> None:
        self.title = title
        self.rows = rows


class Positional:
    """The one argument without a name, which also has a flag (``--model``) and a YAML key."""

    __slots__ = ("help", "metavar", "names", "only_one", "required", "to")

    def __init__(
        self,
        metavar: str,
        *,
        to: str,
        help: str,
        names: tuple[str, ...] = (),
        required: bool = True,
        only_one: str = "",
    ) -> None:
        self.metavar = metavar
        self.to = to
        self.help = help
        self.names = names
        self.required = required
        self.only_one = only_one
        """Advice for who gives two."""
