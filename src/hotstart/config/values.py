"""How the text of a flag, or a value of a YAML file, becomes a value of the settings.

A kind knows what it expects (for errors), what stands for a value in ``--help``, and how to read
one. It raises ``ValueError`` and leaves it to the parser to name the flag. Everything here runs
before the engine is started, so modules that cost (``re``, ``json``) are imported where used.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INFINITY = float("inf")


class Kind:
    """Base of all kinds: any text but an empty one."""

    metavar = "TEXT"
    expects = "a text that is not empty"
    many = False
    """Takes all words up to the next flag."""
    repeats = False
    """Each use of the flag adds to a tuple, where otherwise the last one counts."""

    def parse(self, text: str) -> object:
        """Read a word of the command line. Raises ``ValueError``."""
        if not text:
            raise ValueError
        return text

    def nearest(self, text: str) -> str:
        """The value that ``text`` was probably meant to be; empty: nobody knows."""
        return ""

    def convert(self, value: object) -> object:
        """Read a value of a YAML file. Raises ``ValueError``."""
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError
        return self.parse(str(value))


class Text(Kind):
    """Free text; ``example`` is what help shows for it."""

    def __init__(self, metavar: str = "TEXT", *, empty: bool = False) -> None:
        self.metavar = metavar
        self._empty = empty

    def parse(self, text: str) -> object:
        """The text itself."""
        return text if self._empty else super().parse(text)


class Choice(Kind):
    """One word of several; ``also`` maps further spellings to a word.

    ``metavar`` stands for them in help, where they are too many for a line.
    """

    def __init__(self, *words: str, also: Mapping[str, str] | None = None, metavar: str = "") -> None:
        self.words = words
        self._also = also or {}
        self.metavar = metavar or "{" + ",".join(words) + "}"
        self.expects = "one of " + ", ".join((*words, *self._also))

    def parse(self, text: str) -> object:
        """The word, in its first spelling."""
        word = self._also.get(text, text)
        if word not in self.words:
            raise ValueError
        return word

    def nearest(self, text: str) -> str:
        """The most similar word."""
        from difflib import get_close_matches

        near = get_close_matches(text.lower(), [*self.words, *self._also], n=1, cutoff=0.5)
        return near[0] if near else ""


class Switch(Kind):
    """On or off: ``--x``, ``--no-x``, ``--x=false``."""

    metavar = ""
    expects = "true or false"

    def parse(self, text: str) -> object:
        """From the words people use in files and after ``=``."""
        word = text.lower()
        if word in ("true", "1", "yes", "on"):
            return True
        if word in ("false", "0", "no", "off"):
            return False
        raise ValueError

    def convert(self, value: object) -> object:
        """A YAML boolean, or one of the words."""
        return value if isinstance(value, bool) else super().convert(value)


_LARGEST = 2**62
"""More bytes or tokens than any machine has, and less than what fits into 64 bits."""


class Whole(Kind):
    """A whole number in a range; ``4k`` is 4 000 and ``4K`` is 4 096. ``words`` stand for numbers."""

    metavar = "N"

    def __init__(
        self,
        low: int,
        high: int | None = None,
        *,
        words: Mapping[str, int] | None = None,
        why: str = "",
    ) -> None:
        self._low, self._high = low, high
        self._words = words or {}
        bound = f"{low} or more" if high is None else f"from {low} to {high}"
        self.expects = f"a whole number, {bound}" + (f" ({why})" if why else "")
        if self._words:
            self.expects += ", or " + ", ".join(self._words)

    def parse(self, text: str) -> object:
        """The number. Raises ``ValueError`` outside the range."""
        if text in self._words:
            return self._words[text]
        try:
            number = self._number(text)
        except OverflowError:
            raise ValueError from None
        if number < self._low or number > (_LARGEST if self._high is None else self._high):
            raise ValueError
        return number

    def _number(self, text: str) -> int:
        if text.isascii() and text.removeprefix("-").isdigit():
            return int(text)
        from hotstart.units import parse_count

        return parse_count(text)


class Size(Whole):
    """Bytes: ``5368709120``, ``5GiB``, ``5g``, ``5GB``."""

    metavar = "BYTES"

    def __init__(self, low: int = 1) -> None:
        super().__init__(low)
        self.expects = f"a size of {low} byte or more (5368709120, 5GiB, 5.4GB)"

    def _number(self, text: str) -> int:
        from hotstart.units import parse_size

        return parse_size(text)


class Number(Kind):
    """A finite number in a range; ``above`` excludes the lower bound itself."""

    metavar = "X"

    def __init__(self, low: float, high: float = INFINITY, *, above: bool = False) -> None:
        self._low, self._high, self._above = low, high, above
        bound = f"above {low:g}" if above else f"{low:g} or more"
        self.expects = f"a number {bound}" + ("" if high == INFINITY else f", at most {high:g}")

    def parse(self, text: str) -> object:
        """The number. Raises ``ValueError`` outside the range, for NaN and for infinity."""
        number = float(text)
        if not (self._low <= number <= self._high) or abs(number) == INFINITY:  # NaN compares false
            raise ValueError
        if self._above and number == self._low:
            raise ValueError
        return number


class Json(Kind):
    """A JSON object; single keys can be set as ``--flag.key.key value``."""

    metavar = "JSON"
    expects = "a JSON object with each key once, such as '{\"key\": 1}'"

    def parse(self, text: str) -> object:
        """The object, with ``1k`` and ``1K`` read as numbers."""
        value = parse_json(text)
        if not isinstance(value, dict):
            raise ValueError
        return value

    def convert(self, value: object) -> object:
        """A YAML mapping, or JSON in a string."""
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return value
        if isinstance(value, str):
            return self.parse(value)
        raise ValueError


class Many(Kind):
    """Several values: words up to the next flag, or one JSON list."""

    many = True

    def __init__(self, each: Kind) -> None:
        self.each = each
        self.metavar = f"{each.metavar} [{each.metavar} …]"
        self.expects = f"one or more values, each {each.expects}"

    def parse(self, text: str) -> object:
        """A tuple of one word's values."""
        return self.parse_all([text])

    def parse_all(self, words: Sequence[str]) -> tuple[object, ...]:
        """A tuple of the values of all words. Raises ``ValueError`` when there is none."""
        if len(words) == 1 and words[0].startswith("["):
            value = parse_json(words[0])
            return self._each(value)
        return self._each(list(words))

    def convert(self, value: object) -> object:
        """A YAML list, or a single value."""
        return self._each(value if isinstance(value, list) else [value])

    def _each(self, values: object) -> tuple[object, ...]:
        if not isinstance(values, list) or not values:
            raise ValueError
        return tuple(self.each.convert(value) for value in values)


class Repeated(Kind):
    """A flag that may be given several times, each with one value: a tuple of all."""

    repeats = True

    def __init__(self, each: Kind) -> None:
        self.each = each
        self.metavar = each.metavar
        self.expects = each.expects

    def parse(self, text: str) -> object:
        """A tuple of the one value."""
        return (self.each.parse(text),)

    def convert(self, value: object) -> object:
        """A YAML list, or a single value."""
        return tuple(self.each.convert(one) for one in (value if isinstance(value, list) else [value]))


def parse_json(text: str) -> object:
    """JSON that may hold counts as people write them: ``{"size": 1k}``. Raises ``ValueError``."""
    import json

    try:
        try:
            return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_each_once)
        except _RepeatedKeyError:
            raise
        except ValueError:
            plain = _plain_counts(text)
            return json.loads(plain, parse_constant=_refuse_constant, object_pairs_hook=_each_once)
    except (RecursionError, OverflowError):
        raise ValueError("too deep or too large") from None


def parse_scalar(text: str) -> object:
    """The value of a dotted key: JSON where it is JSON, else a count (``16K``), else the text."""
    try:
        return parse_json(text)
    except _RepeatedKeyError:
        raise
    except ValueError:
        return text


class _RepeatedKeyError(ValueError):
    """JSON, but for a key that an object has twice, of which one would be taken without a word."""


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _RepeatedKeyError
    return found


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _plain_counts(text: str) -> str:
    """Replace ``1k`` by ``1000`` outside strings."""
    import re

    from hotstart.units import parse_count

    def plain(match: re.Match[str]) -> str:
        word = match.group()
        return word if word.startswith('"') else str(parse_count(word))

    return re.sub(r'"(?:[^"\\]|\\.)*"|(?<![\w.])\d+(?:\.\d+)?[kKmMgGtT]\b', plain, text)
