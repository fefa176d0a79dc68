"""Which credentials a request to S3 is signed with: AWS's own order, and who was asked before.

1. unsigned, where a variable asks for it; 2. keys in the environment; 3. web identity (a token file
and a role); 4. the profile that AWS_PROFILE names; 5. Tensorizer's variables; 6. the default profile;
7. the container's role; 8. the machine's role; 9. nothing was found: unsigned.

Static keys and credential_process are resolved here, roles by ``obstore``, which also renews them.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from msgspec import Struct

from hotstart.errors import ConfigError, StorageError
from hotstart.storage.aws_files import Profile
from hotstart.storage.variables import Value, first, option, readable, switch, web_address

_PROCESS_SECONDS = 60
_RENEW_BEFORE = timedelta(minutes=5)
_VENDOR = "/sys/class/dmi/id/sys_vendor"


class Keys(Struct, frozen=True, kw_only=True):
    """What a signature is made of. Secret."""

    access_key_id: str
    secret_access_key: str
    token: str | None = None
    expires_at: datetime | None = None

    def __repr__(self) -> str:
        return "Keys(…)"


class Provider:
    """Gives ``obstore`` keys, asked for again when they are about to expire. Thread-safe."""

    def __init__(self, fetch: Callable[[], Keys]) -> None:
        self._fetch = fetch
        self._keys: Keys | None = None
        self._lock = threading.Lock()

    def keys(self) -> Keys:
        """The keys of now. Raises ConfigError and StorageError."""
        with self._lock:
            soon = datetime.now(timezone.utc) + _RENEW_BEFORE
            if self._keys is None or (self._keys.expires_at is not None and self._keys.expires_at < soon):
                self._keys = self._fetch()
            return self._keys

    def __call__(self) -> dict[str, Any]:
        """As ``obstore`` wants them."""
        keys = self.keys()
        return {name: getattr(keys, name) for name in keys.__struct_fields__}


class Credentials(Struct, frozen=True, kw_only=True):
    """What was chosen; no secret in it but behind ``provider``."""

    source: str
    """For people: ``keys of AWS_ACCESS_KEY_ID``."""
    config: dict[str, Any] = {}
    provider: Provider | None = None
    unsigned: bool = False
    advice: str = ""
    """What to look at when the store refuses."""


def choose(environ: Mapping[str, str], profile: Profile) -> Credentials:
    """See the module. Nobody is asked yet. Raises ConfigError for half a pair of keys and its like."""
    if options := _of_options(environ):
        return options
    unsigned = switch(environ, "AWS_SKIP_SIGNATURE", "AWS_NO_SIGN_REQUEST", "RUNAI_STREAMER_S3_UNSIGNED")
    if unsigned:
        return Credentials(source=f"none, unsigned ({unsigned.origin})", unsigned=True)
    return (
        _from_environment(environ)
        or _web_identity(environ)
        or (_from_profile(environ, profile) if profile.explicit else None)
        or _of_tensorizer(environ)
        or _from_profile(environ, profile)
        or _of_container(environ)
        or _of_machine(environ)
        or _nothing(environ, profile)
    )


def _of_options(environ: Mapping[str, str]) -> Credentials | None:
    """Of --model-loader-extra-config, see :func:`hotstart.storage.variables.with_options`."""
    pair = _pair(environ, option("s3_access_key_id"), option("s3_secret_access_key"))
    if pair is None:
        return None
    keys = Keys(access_key_id=pair[0], secret_access_key=pair[1])
    return Credentials(
        source=f"keys of {option('s3_access_key_id')}",
        provider=Provider(lambda: keys),
        advice="Check s3_access_key_id and s3_secret_access_key, and whether they belong to this endpoint",
    )


def _from_environment(environ: Mapping[str, str]) -> Credentials | None:
    pair = _pair(environ, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    if pair is None:
        return None
    token = first(environ, "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
    expires = first(environ, "AWS_CREDENTIAL_EXPIRATION")
    until = _time(expires) if token and expires else None
    if until is not None and until <= datetime.now(timezone.utc):
        raise ConfigError(
            f"The keys in the environment expired at {expires.text} (AWS_CREDENTIAL_EXPIRATION)",
            advice="Get new ones and start again, or unset them",
        )
    keys = Keys(access_key_id=pair[0], secret_access_key=pair[1], token=token.text or None, expires_at=until)
    also = f" and {token.origin}" if token else ""
    profile = first(environ, "AWS_PROFILE")
    return Credentials(
        source=f"keys of AWS_ACCESS_KEY_ID{also}"
        + (f", valid until {expires.text}" if until else "")
        + (f" (they go before AWS_PROFILE={profile.text})" if profile else ""),
        provider=Provider(lambda: keys),
        advice="Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and whether they belong to this endpoint",
    )


def _web_identity(environ: Mapping[str, str]) -> Credentials | None:
    token = first(environ, "AWS_WEB_IDENTITY_TOKEN_FILE")
    return _assume(environ, token, first(environ, "AWS_ROLE_ARN"), "AWS_ROLE_ARN") if token else None


def _assume(environ: Mapping[str, str], token: Value, role: Value, wanted: str) -> Credentials:
    if not role:
        raise ConfigError(
            f"There is a web identity token ({token.origin}) and no role to assume with it",
            expected=f"{wanted}, the role's name arn:aws:iam::ACCOUNT:role/NAME",
            advice="Annotate the service account with its role, or unset the token",
        )
    config = {"web_identity_token_file": readable(token, "a token file"), "role_arn": role.text}
    if session := first(environ, "AWS_ROLE_SESSION_NAME"):
        config["role_session_name"] = session.text
    if endpoint := first(environ, "AWS_ENDPOINT_URL_STS"):
        if endpoint.text.startswith("http://"):
            raise ConfigError(f"{endpoint} has no encryption", expected="https:// for the token of a role")
        config["endpoint_url_sts"] = web_address(endpoint)
    return Credentials(
        source=f"web identity, role {role.text} ({token.origin})",
        config=config,
        advice=f"Check that the role {role.text} trusts this service account and may read the bucket",
    )


def _from_profile(environ: Mapping[str, str], profile: Profile) -> Credentials | None:
    """In the order of AWS's own tools: role, single sign-on, credentials file, process, config file."""
    role = profile.get("role_arn")
    if role and (token := profile.get("web_identity_token_file")):
        return _assume(environ, token, role, "role_arn")
    if role or profile.get("sso_session") or profile.get("sso_start_url"):
        kind = "assumes a role by other credentials" if role else "signs on by a browser (SSO)"
        raise ConfigError(
            f"The profile {profile.name} of {profile.config_file} {kind}, which hotstart cannot",
            expected="keys, credential_process or a web identity token in the profile",
            advice="Let AWS's tool do it: eval \"$(aws configure export-credentials "
            f'--profile {profile.name} --format env)", or set '
            "credential_process to that command (without eval and --format env) in another profile",
        )
    stored = _stored(profile, profile.credentials, profile.credentials_file)
    if stored is None and (command := profile.get("credential_process")):
        return Credentials(
            source=f"credential_process of {command.origin}",
            provider=Provider(lambda: _run(command)),
            advice=f"Check what credential_process of {command.origin} gives",
        )
    return stored or _stored(profile, profile.config, profile.config_file)


def _stored(profile: Profile, settings: Mapping[str, str], path: str) -> Credentials | None:
    pair = _pair(
        settings, "aws_access_key_id", "aws_secret_access_key", f" in profile {profile.name} of {path}"
    )
    if pair is None:
        return None
    token = settings.get("aws_session_token", "").strip()
    keys = Keys(access_key_id=pair[0], secret_access_key=pair[1], token=token or None)
    return Credentials(
        source=f"keys of profile {profile.name} in {path}",
        provider=Provider(lambda: keys),
        advice=f"Check the keys of profile {profile.name} in {path}: do they belong to this endpoint?",
    )


def _of_tensorizer(environ: Mapping[str, str]) -> Credentials | None:
    pair = _pair(environ, "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY")
    if pair is None:
        return None
    keys = Keys(access_key_id=pair[0], secret_access_key=pair[1])
    return Credentials(source="keys of S3_ACCESS_KEY_ID", provider=Provider(lambda: keys))


def _of_container(environ: Mapping[str, str]) -> Credentials | None:
    if relative := first(environ, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        return Credentials(
            source=f"role of the container ({relative.origin})",
            config={"container_credentials_relative_uri": relative.text},
            advice="Check that the task's role may read the bucket",
        )
    full = first(environ, "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if not full:
        return None
    token = first(environ, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
    if not token:
        raise ConfigError(
            f"{full.origin} is set and AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE is not",
            expected="both, as EKS Pod Identity sets them",
            advice="Pass AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or unset the variable",
        )
    return Credentials(
        source=f"role of the pod ({full.origin})",
        config={
            "container_credentials_full_uri": full.text,
            "container_authorization_token_file": readable(token, "a token file"),
        },
        advice="Check that the role of this pod's service account may read the bucket",
    )


def _of_machine(environ: Mapping[str, str]) -> Credentials | None:
    """Without a request: its answer takes seconds wherever there is no metadata service."""
    if switch(environ, "AWS_EC2_METADATA_DISABLED"):
        return None
    endpoint = first(environ, "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_METADATA_ENDPOINT")
    if not endpoint and not _on_ec2():
        return None
    return Credentials(
        source="role of the machine" + (f" ({endpoint.origin})" if endpoint else " (EC2 instance profile)"),
        config={"metadata_endpoint": endpoint.text.rstrip("/")} if endpoint else {},
        advice="Check that the machine has an instance profile and that its role may read the bucket "
        "(in a container: that its metadata hop limit is 2)",
    )


def _nothing(environ: Mapping[str, str], profile: Profile) -> Credentials:
    off = " (off: AWS_EC2_METADATA_DISABLED)" if switch(environ, "AWS_EC2_METADATA_DISABLED") else ""
    return Credentials(
        source="none found, unsigned",
        unsigned=True,
        advice="No credentials were found: neither AWS_ACCESS_KEY_ID, nor AWS_WEB_IDENTITY_TOKEN_FILE, nor "
        f"profile {profile.name} in {profile.credentials_file}, nor a role of a container or machine{off}. "
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    )


def _pair(settings: Mapping[str, str], key: str, secret: str, where: str = "") -> tuple[str, str] | None:
    """Both, or neither. Raises ConfigError for one of them."""
    values = [settings.get(name, "").strip() for name in (key, secret)]
    if not any(values):
        return None
    if not all(values):
        there, absent = (key, secret) if values[0] else (secret, key)
        raise ConfigError(
            f"{there} is set{where} and {absent} is not",
            expected="both, or neither",
            advice=f"Set {absent} too, or remove {there} so that other credentials are looked for",
        )
    return values[0], values[1]


def _run(command: Value) -> Keys:
    """https://docs.aws.amazon.com/sdkref/latest/guide/feature-process-credentials.html"""
    try:
        done = subprocess.run(
            shlex.split(command.text),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROCESS_SECONDS,
            check=False,
        )
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        problem = f"ended with {done.returncode}: {words[-1][:200] if words else 'no message'}"
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
        if done.returncode == 0:
            problem = "gave no version 1 with AccessKeyId and SecretAccessKey"
            if answer.get("Version") == 1:
                expires = answer.get("Expiration")
                return Keys(
                    access_key_id=answer["AccessKeyId"],
                    secret_access_key=answer["SecretAccessKey"],
                    token=answer.get("SessionToken"),
                    expires_at=_time(Value(expires, "Expiration")) if expires else None,
                )
    except subprocess.TimeoutExpired:
        problem = f"did not end within {_PROCESS_SECONDS} s"
    except OSError as error:
        problem = f"cannot be run: {error.strerror}"
    except (ValueError, KeyError, AttributeError):
        problem = "printed no JSON of the expected form"
    raise StorageError(
        f"credential_process of {command.origin} {problem}",
        expected='{"Version": 1, "AccessKeyId": …, "SecretAccessKey": …}',
        advice="Run the command by hand",
    )


def _time(value: Value) -> datetime:
    try:
        time = datetime.fromisoformat(value.text.replace("Z", "+00:00"))
    except ValueError:
        raise ConfigError(
            f"{value.origin} is no time: {value.text!a}", expected="2030-01-31T12:00:00Z"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def _on_ec2() -> bool:
    try:
        with open(_VENDOR, encoding="utf-8") as file:
            if "amazon" in file.read().lower():
                return True
        with open(os.path.join(os.path.dirname(_VENDOR), "bios_version"), encoding="utf-8") as file:
            return "amazon" in file.read().lower()  # machines of the older kind (Xen)
    except (OSError, UnicodeDecodeError):
        return False
