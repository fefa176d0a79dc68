"""The files behind ``--ssl-*``, looked at before anything listens with them."""

from __future__ import annotations

import errno
import os
import ssl
import stat

from hotstart.config.settings import HttpConfig
from hotstart.errors import ConfigError, HotstartError, raise_all


def check_tls(http: HttpConfig) -> str:
    """One line for the report. Raises ConfigError that names the file, all problems together."""
    certificates, key = http.ssl_certfile, http.ssl_keyfile
    assert certificates is not None
    assert key is not None
    problems: list[HotstartError] = []
    for flag, path in (("--ssl-certfile", certificates), ("--ssl-ca-certs", http.ssl_ca_certs)):
        if path is not None:
            problems += _problems(flag, path, certificates=True)
    problems += _problems("--ssl-keyfile", key, certificates=False)
    raise_all(problems)
    _load(certificates, key)
    return f"{certificates} and its key {key}"


def _problems(flag: str, path: str, *, certificates: bool) -> list[HotstartError]:
    try:
        _read_a_byte(path)
        if certificates:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        return [
            ConfigError(
                f"{flag} {path} holds no usable certificate ({_reason(error)})", expected="a PEM file"
            )
        ]
    except OSError as error:
        return [ConfigError(f"{flag} {path} cannot be read: {error.strerror}", expected="a PEM file")]
    return []


def _read_a_byte(path: str) -> None:
    """Raises OSError. OpenSSL opens the file by its name, more than once, and would wait at a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        os.read(fd, 1)
    finally:
        os.close(fd)


def _load(certificates: str, key: str) -> None:
    encrypted = False

    def no_password() -> str:
        nonlocal encrypted
        encrypted = True
        return ""

    try:
        # Without a password to call for, OpenSSL asks for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificates, key, no_password)
    except ssl.SSLError as error:
        if encrypted:
            raise ConfigError(
                f"--ssl-keyfile {key} is encrypted",
                expected="a key without a passphrase",
                advice=f"openssl pkey -in {key} writes one",
            ) from None
        raise ConfigError(
            f"--ssl-keyfile {key} and --ssl-certfile {certificates} cannot be used together "
            f"({_reason(error)})",
            expected="a PEM private key, and the certificate made for it",
        ) from None


def _reason(error: ssl.SSLError) -> str:
    return error.reason.replace("_", " ").lower() if error.reason else str(error)
