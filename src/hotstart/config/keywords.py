"""The settings of a model as keywords of Python: the rows of the flag table by the names of their fields.

A value means what the flag's would: it may be written as there (``"2GiB"``, ``"half"``, ``"auto"``),
is held to the same bounds, and is refused where the flag is.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from hotstart.config.flags import NO_EFFECT, Flag
from hotstart.config.parse import build_config
from hotstart.config.settings import SECTIONS, Config
from hotstart.config.table import SERVE
from hotstart.errors import ConfigError, HotstartError, raise_all

_OF_A_SERVER = ("http.", "log.")

log = logging.getLogger("hotstart")


def config_of(model: str | os.PathLike[str], settings: dict[str, Any]) -> Config:
    """The settings of a model in this process. None leaves the default.

    Raises ConfigError, or ProblemsFound when there are several.
    """
    rows = _rows()
    values: dict[str, Any] = {"model.model": os.fspath(model)}
    problems: list[HotstartError] = []
    for name, value in settings.items():
        row = rows.get(name)
        try:
            if row is None:
                _without_field(name, value, rows)
            elif value is not None:
                values[row.to] = _value(name, row, value)
        except ConfigError as error:
            problems.append(error)
    raise_all(problems)
    return build_config(values)


def _without_field(name: str, value: Any, rows: dict[str, Flag]) -> None:
    """A flag of ``serve`` that sets nothing: it is refused, or has no effect. Raises ConfigError."""
    from difflib import get_close_matches

    flag = "--" + name.replace("_", "-")
    row = next((row for row in SERVE.rows() if flag in row.names and not row.to), None)
    if row is not None:
        if value is not None and value is not False:
            _value(name, row, value)
        return
    near = get_close_matches(name, rows, n=1)
    raise ConfigError(
        f"LLM has no setting {name}",
        expected="" if near else "one of " + ", ".join(sorted(rows)),
        advice=f"Did you mean {near[0]}?" if near else "",
    )


def _rows() -> dict[str, Flag]:
    """By the name of the field that a row sets; what only a server has is left out."""
    sections = {f"{name}.{field}" for name, kind in SECTIONS.items() for field in kind.__struct_fields__}
    return {
        row.to.partition(".")[2]: row
        for row in SERVE.rows()
        if row.to in sections and not row.to.startswith(_OF_A_SERVER)
    }


def _value(name: str, row: Flag, value: Any) -> object:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, tuple):
        value = list(value)
    shown = "***" if row.secret else repr(value)
    refusal = row.reasons.get(value) if isinstance(value, str) else None
    if refusal is None:
        try:
            value = row.kind.convert(value)
        except ValueError:
            near = row.kind.nearest(str(value))
            raise ConfigError(
                f"LLM has {name}={shown}",
                expected=row.kind.expects,
                advice=f"Did you mean {near}?" if near else "",
            ) from None
        refusal = row.refusal(value)
    if refusal is not None:
        because, instead = refusal
        raise ConfigError(f"{name}={shown} is refused: {because}", advice=instead[:1].upper() + instead[1:])
    if row.verdict is NO_EFFECT:
        log.info("%s has no effect: %s", name, row.because)
    return value
