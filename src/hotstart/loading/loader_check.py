"""Whether the loader that was asked for can read this model into this device. Torch-free; reads nothing.

Serve, check and the engine ask it before anything else, a download included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotstart.config.load_formats import (
    FORMATS,
    device_problem,
    is_stream,
    key_problems,
    place_problem,
)
from hotstart.errors import ConfigError, HotstartError, ProblemsFound, raise_all
from hotstart.loading.options import LoaderOptions

if TYPE_CHECKING:
    from hotstart.config.settings import Config, LoadConfig


def check_loader(config: Config) -> str:
    """What was found, for a report; empty for hotstart's own readers.

    Raises ConfigError, or ProblemsFound with all of them: a wrong key or value, a place or device that
    the loader cannot use, flags that are for other loaders, a library that is not installed.
    """
    load = config.load
    found: list[HotstartError | None] = []
    try:
        check_keys(config)
    except ProblemsFound as error:
        found += error.problems
    except HotstartError as error:
        found.append(error)
    if not is_stream(load.load_format):
        raise_all([problem for problem in found if problem is not None])
        return ""
    place = _place_of(config)
    found += [
        place_problem(load.load_format, place),
        _wrong_device(config),
        *_flags_of_others(load),
        _not_installed(load.load_format, place),
    ]
    raise_all([problem for problem in found if problem is not None])
    from hotstart.loading.streams.base import library_of

    return f"--load-format {load.load_format}: {library_of(load.load_format)} is installed"


def check_keys(config: Config) -> None:
    """Raise for keys that are wrong, do not go together, or not with this model or these ranks.

    Looks at nothing but the file of a key. Raises ConfigError, or ProblemsFound with all of them.
    """
    load, given = config.load, config.load.model_loader_extra_config
    raise_all(key_problems(load.load_format, given))
    if not is_stream(load.load_format):
        LoaderOptions.parse(given)
    if load.load_format == "tensorizer":
        from hotstart.loading.tensorizer_options import check_options

        check_options(given, config.model, _place_of(config))
    elif "pattern" in given:
        from hotstart.checkpoint.sharded_names import Pattern
        from hotstart.loading.by_format import rank_of

        Pattern(given["pattern"]).check(rank_of(config))


def _place_of(config: Config) -> str:
    """One of :data:`~hotstart.config.load_formats.PLACES`."""
    from hotstart.checkpoint.resolve import is_path
    from hotstart.storage.location import is_location, parse_location

    name = config.model.location or config.model.model
    if is_location(name):
        return parse_location(name).scheme
    return "dir" if is_path(name) else "hub"


def _wrong_device(config: Config) -> HotstartError | None:
    if not FORMATS[config.load.load_format].device:
        return None
    from hotstart.device.choose import choose

    try:
        kind = choose(config.device.device).kind
    except HotstartError:
        return None  # the check of the device says what is wrong with it
    return device_problem(config.load.load_format, kind)


def _flags_of_others(load: LoadConfig) -> list[HotstartError]:
    given = [
        f"--read-strategy {load.read_strategy}" if load.read_strategy != "auto" else "",
        f"--disk-cache {load.disk_cache}" if load.disk_cache is not None else "",
    ]
    return [
        ConfigError(
            f"{flag} with --load-format {load.load_format}: that library reads by itself",
            expected="one of the two",
            advice="Leave one of them out",
        )
        for flag in given
        if flag
    ]


def _not_installed(load_format: str, place: str) -> HotstartError | None:
    row = FORMATS[load_format]
    needed = [(row.library, row.distribution)]
    if place in row.parts:
        needed.append(row.parts[place])
    missing = [distribution for library, distribution in needed if not _is_there(library)]
    if not missing:
        return None
    what = f" of a model at {place}://" if row.library and _is_there(row.library) else ""
    absent = "is" if len(missing) == 1 else "are"
    return ConfigError(
        f"--load-format {load_format}{what} needs {' and '.join(missing)}, which {absent} not installed",
        expected=f"the extra {row.extra} of hotstart",
        advice=f"Install it: {row.install}",
    )


def _is_there(library: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(library) is not None
    except (ImportError, ValueError):
        return False
