"""AWS's shared files, ``~/.aws/config`` and ``~/.aws/credentials``: one profile of them.

https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping

from msgspec import Struct

from hotstart.errors import ConfigError
from hotstart.storage.variables import Value, first, home


class Profile(Struct, frozen=True):
    """Settings of one profile. Empty when there is none."""

    name: str
    explicit: bool
    """Whether a variable names it; otherwise it is ``default``, which nobody asked for."""
    config: dict[str, str] = {}
    config_file: str = ""
    credentials: dict[str, str] = {}
    credentials_file: str = ""
    services: dict[str, str] = {}
    """The ``services`` section that the profile names."""

    def get(self, key: str) -> Value:
        """A setting of the profile, from the credentials file first."""
        for settings, path in (
            (self.credentials, self.credentials_file),
            (self.config, self.config_file),
        ):
            if text := settings.get(key, "").strip():
                return Value(text, f"profile {self.name} of {path}")
        return Value()

    def s3(self, key: str) -> Value:
        """A setting below ``s3 =`` in the profile."""
        text = _nested(self.config.get("s3", "")).get(key, "")
        return Value(text, f"profile {self.name} of {self.config_file}") if text else Value()

    @property
    def endpoint(self) -> Value:
        """``endpoint_url`` for S3: of the services section, then of the profile."""
        text = _nested(self.services.get("s3", "")).get("endpoint_url", "")
        if text:
            return Value(text, f"services section of profile {self.name} in {self.config_file}")
        return self.get("endpoint_url")


def read_profile(environ: Mapping[str, str]) -> Profile:
    """The profile in use. Raises ConfigError when a variable names one that is in no file."""
    chosen = first(environ, "AWS_PROFILE", "AWS_DEFAULT_PROFILE")
    name = chosen.text or "default"
    config_path = _path(environ, "AWS_CONFIG_FILE", "config")
    credentials_path = _path(environ, "AWS_SHARED_CREDENTIALS_FILE", "credentials")
    config, credentials = _read(config_path), _read(credentials_path)
    profiles = {_profile_name(section): section for section in config.sections()}
    profile = dict(config[profiles[name]]) if name in profiles else {}
    stored = dict(credentials[name]) if credentials.has_section(name) else {}
    if chosen and name not in profiles and not credentials.has_section(name):
        known = sorted({*filter(None, profiles), *credentials.sections()})
        raise ConfigError(
            f"{chosen.origin} names the profile {name}, which is neither in {config_path} "
            f"nor in {credentials_path}",
            expected=f"one of {', '.join(known[:8])}" if known else "a profile; there is none in these files",
            advice="Correct the variable, mount the files, or unset it",
        )
    services = f"services {profile.get('services', '').strip()}"
    return Profile(
        name=name,
        explicit=bool(chosen),
        config=profile,
        config_file=config_path,
        credentials=stored,
        credentials_file=credentials_path,
        services=dict(config[services]) if config.has_section(services) else {},
    )


def _path(environ: Mapping[str, str], variable: str, name: str) -> str:
    return os.path.expanduser(environ.get(variable) or os.path.join(home(environ), ".aws", name))


def _read(path: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, default_section="\0")
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file, path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (configparser.Error, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise ConfigError(f"{path}{where} is not in the format of AWS's files") from None
    return parser


def _profile_name(section: str) -> str:
    """``default`` and ``[profile NAME]``; empty for sections of another kind."""
    kind, _, name = section.partition(" ")
    if kind == "profile" and name:
        return name.strip().strip("\"'")
    return section if section == "default" else ""


def _nested(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip().lower(): value.strip() for key, _, value in pairs}
