"""From the command line and the environment to the settings of a server.

Only what the flags say is read here, in about 3 ms; :attr:`Parsed.config` builds the settings on
first use, because importing msgspec costs 20 ms that the engine need not wait for.
"""

from __future__ import annotations

from hotstart.config.command import Arguments, Command
from hotstart.config.table import SERVE
from hotstart.errors import ConfigError, HotstartError, raise_all

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from hotstart.config.settings import Config

API_KEY_VARIABLES = ("HOTSTART_API_KEY", "VLLM_API_KEY")


class Parsed:
    """A command line that is in order."""

    def __init__(self, values: dict[str, Any], notes: list[str]) -> None:
        self.values = values
        """What was given, by field of the settings (``http.port``)."""
        self.notes = notes
        """Lines for the log, once it is set up."""
        self._config: Config | None = None

    @property
    def model(self) -> str:
        """The model as given."""
        return str(self.values["model.model"])

    @property
    def config(self) -> Config:
        """The settings: the values, and the defaults of the rest."""
        if self._config is None:
            self._config = build_config(self.values)
        return self._config


def parse_serve(argv: Sequence[str], environ: Mapping[str, str], *, command: Command = SERVE) -> Parsed:
    """Parse the words after ``hotstart serve``.

    Raises ``ConfigError``, ``ProblemsFound`` when there are several, and
    :class:`~hotstart.config.command.HelpWanted`.
    """
    arguments = command.parse(argv)
    _check_model(arguments)
    _check_together(arguments)
    values = arguments.values
    values.pop("config", None)
    name, _, query = values["model.model"].partition("?")
    # A web address may carry a signature behind its path, and the name is shown to everybody.
    values.setdefault(
        "model.served_model_name", (name if query and "://" in name else values["model.model"],)
    )
    if "http.api_key" not in values:
        key = next((environ[name] for name in API_KEY_VARIABLES if environ.get(name)), None)
        if key is not None:
            values["http.api_key"] = (key,)
    arguments.notes.extend(_injected(environ))
    return Parsed(values, arguments.notes)


def build_config(values: Mapping[str, Any]) -> Config:
    """The settings from values by field (``http.port``)."""
    from hotstart.config import settings

    sections: dict[str, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for path, value in values.items():
        section, dot, field = path.partition(".")
        if dot:
            sections.setdefault(section, {})[field] = value
        else:
            whole[section] = value
    for section, fields in sections.items():
        whole[section] = settings.SECTIONS[section](**fields)
    return settings.Config(**whole)


def _check_model(arguments: Arguments) -> None:
    """Refuse a device node; what a path holds is checked later, with everything else on disk."""
    model = arguments.values["model.model"]
    if model.startswith("/dev/") and not model.startswith("/dev/shm/"):
        raise ConfigError(
            f"{model} is a device",
            expected="a directory, a name on the hub, or an address such as s3://BUCKET/PREFIX",
            advice="Mount it and pass the directory: `hotstart serve /mnt/model`",
        )


def _check_together(arguments: Arguments) -> None:
    """Flags that are right alone and wrong together."""
    values, given = arguments.values, arguments.given
    problems: list[HotstartError] = []
    if "http.uds" in values:
        problems += [
            ConfigError(f"--uds is given and {given[field]} too", expected="a socket or an address")
            for field in ("http.host", "http.port")
            if field in values
        ]
    if ("http.ssl_keyfile" in values) != ("http.ssl_certfile" in values):
        problems.append(ConfigError("TLS needs both --ssl-certfile and --ssl-keyfile; only one is given"))
    problems += _client_certificates(values)
    seqs, tokens = values.get("scheduler.max_num_seqs"), values.get("scheduler.max_num_batched_tokens")
    if seqs and tokens and tokens < seqs:
        problems.append(
            ConfigError(
                f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}",
                expected="at least one token for each request in a step",
            )
        )
    if values.get("scheduler.enable_chunked_prefill") is False and (
        most := values.get("scheduler.long_prefill_token_threshold")
    ):
        problems.append(
            ConfigError(
                f"--long-prefill-token-threshold {most} cuts prompts, "
                "and --no-enable-chunked-prefill forbids it",
                expected="one of them",
            )
        )
    raise_all(problems)


def _client_certificates(values: Mapping[str, Any]) -> list[HotstartError]:
    """Flags that ask clients for certificates, and would not: a server left open by mistake."""
    wanted, authorities = values.get("http.ssl_cert_reqs"), values.get("http.ssl_ca_certs")
    problems: list[HotstartError] = []
    if authorities is not None and wanted is None:
        problems.append(
            ConfigError(
                "--ssl-ca-certs is given, and clients are not asked for certificates",
                expected="--ssl-cert-reqs too (2: required, 1: optional, 0: not asked for)",
            )
        )
    if wanted and authorities is None:
        problems.append(
            ConfigError(
                f"--ssl-cert-reqs {wanted} is given without authorities to check certificates by",
                expected="--ssl-ca-certs too",
            )
        )
    if authorities is not None and "http.ssl_certfile" not in values and "http.ssl_keyfile" not in values:
        problems.append(
            ConfigError(
                "--ssl-ca-certs is given without a certificate of the server's own",
                expected="--ssl-certfile and --ssl-keyfile too",
            )
        )
    return problems


def _injected(environ: Mapping[str, str]) -> list[str]:
    """Variables that a cluster sets for a service named hotstart, such as HOTSTART_PORT=tcp://….

    None of ours ends like these, so they can only be noise; see vllm#18209 for what they do to a
    server that reads them.
    """
    names = sorted(name for name in environ if name.startswith("HOTSTART_") and _is_service_link(name))
    if not names:
        return []
    return [
        f"ignored {', '.join(names[:3])}{' …' if len(names) > 3 else ''}: "
        "a cluster sets such variables for a service named hotstart; no setting of ours is read from them"
    ]


def _is_service_link(name: str) -> bool:
    return (
        name.endswith(("_SERVICE_HOST", "_SERVICE_PORT", "_PORT"))
        or "_SERVICE_PORT_" in name
        or ("_PORT_" in name and name.endswith(("_TCP", "_UDP", "_SCTP", "_PROTO", "_ADDR")))
    )
