"""``hotstart check MODEL``, and the same checks at the head of ``serve``.

Everything that can be known without reading weights is looked at, and every problem is reported
together: an operator who mends one thing should not meet the next after minutes of loading.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from hotstart.checkpoint.base import Checkpoint, ModelFiles
from hotstart.checkpoint.files import load_model_files, overrides_of
from hotstart.checkpoint.folder import Folder, open_folder, shown_folder
from hotstart.checkpoint.layout import describe
from hotstart.checkpoint.refusals import no_directory
from hotstart.checkpoint.resolve import is_path, resolve
from hotstart.checkpoint.wording import count
from hotstart.cli.check_place import (
    check_disk_cache,
    check_mount,
    check_place,
    check_room_for_copies,
    describe_folder,
)
from hotstart.cli.limits import address_space
from hotstart.cli.output import say
from hotstart.config.load_formats import is_stream
from hotstart.errors import HotstartError, ProblemsFound
from hotstart.loading.loader_check import check_loader
from hotstart.storage.access import check_directory
from hotstart.storage.location import is_location, shown
from hotstart.storage.mounts import Mount
from hotstart.storage.residency import resident_fraction
from hotstart.units import format_size

if TYPE_CHECKING:
    from hotstart.checkpoint.hub import Files
    from hotstart.config.settings import Config, HttpConfig
    from hotstart.frontend.start import Text
    from hotstart.loading.match import Matched
    from hotstart.models.base import Family, Geometry


class Finding(Struct, frozen=True):
    """One line of the report."""

    name: str
    status: str
    """``ok``, ``warn``, ``fail`` or ``skip`` (an earlier failure leaves nothing to look at)."""
    text: str
    advice: str = ""


class Report(Struct):
    """What the checks found; the fields behind a failed check are None."""

    path: str = ""
    folder: Folder | None = None
    mount: Mount | None = None
    files: ModelFiles | None = None
    checkpoint: Checkpoint | None = None
    family: Family | None = None
    geometry: Geometry | None = None
    matched: Matched | None = None
    text: Text | None = None
    residency: dict[str, float | None] = {}
    """Share of each weight file in the page cache, by path; None: unknown."""
    findings: list[Finding] = []
    problems: list[HotstartError] = []

    def texts(self, name: str) -> list[str]:
        """What a check that passed has to say."""
        return [finding.text for finding in self.findings if (finding.name, finding.status) == (name, "ok")]

    @property
    def warnings(self) -> list[str]:
        """Texts of the checks that ended in a warning."""
        return [finding.text for finding in self.findings if finding.status == "warn"]

    @property
    def resident(self) -> float | None:
        """Share of all weight files in the page cache; None: unknown."""
        if self.checkpoint is None or None in self.residency.values() or not self.residency:
            return None
        sizes = {file.path: file.size for file in self.checkpoint.files}
        cached = sum(sizes[path] * (share or 0.0) for path, share in self.residency.items())
        return cached / max(1, sum(sizes.values()))

    def ok(self, name: str, text: str) -> None:
        """Add a check that passed."""
        self.findings.append(Finding(name, "ok", text))

    def warn(self, name: str, text: str) -> None:
        """Add a check that passed, but."""
        self.findings.append(Finding(name, "warn", text))

    def skip(self, name: str, reason: str) -> None:
        """Add a check that could not be made."""
        self.findings.append(Finding(name, "skip", reason))

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Turn the errors of a check into findings and go on."""
        try:
            yield
        except HotstartError as error:
            for problem in error.problems if isinstance(error, ProblemsFound) else (error,):
                if str(problem) in map(str, self.problems):
                    continue  # two checks met the same thing
                self.problems.append(problem)
                expected = f"; expected {problem.expected.rstrip('.')}" if problem.expected else ""
                self.findings.append(
                    Finding(name, "fail", problem.found.rstrip(".") + expected, problem.advice)
                )


DeviceCheck = Callable[["Config", Report], str]
"""Whether the model fits: one line for the report. Raises HotstartError. Called when the model is known."""


def run_checks(
    config: Config,
    *,
    device: DeviceCheck | None = None,
    port: bool = False,
    text: bool = True,
    opened: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> Report:
    """Look at everything but the weights' bytes; problems are collected in the report, not raised.

    ``device`` is asked whether the model fits, ``port`` tries to bind the address, ``text`` builds
    tokenizer and chat template, ``opened`` is told the weight files as soon as they are known to be
    whole. Reads a few kilobytes of each weight file, and whole tensors only where a tied weight is
    stored twice.
    """
    report = Report()
    with report.check("loader"):
        if loader := check_loader(config):
            report.ok("loader", loader)
    if report.problems and not is_path(config.model.model):
        report.skip("model", "not fetched, for the loader would not read it")
    else:
        config = _find_model(config, report)
    with report.check("mount"):
        check_mount(config)
    if report.folder is not None:
        check_place(report)
    check_disk_cache(config, report)
    if report.folder is not None:
        _check_config(config, report)
        _check_weights(config, report, opened)
        if text:
            _check_text(config, report)
    if limit := address_space():
        report.warn("memory", limit)
    if device is not None:
        if report.matched is not None:
            with report.check("device"):
                report.ok("device", device(config, report))
        else:
            report.skip("device", "needs a model and its weights")
    if config.http.ssl_certfile is not None:
        from hotstart.cli.tls import check_tls

        with report.check("tls"):
            report.ok("tls", check_tls(config.http))
    if port:
        with report.check("port"):
            report.ok("port", _try_port(config.http))
    return report


def _find_model(config: Config, report: Report) -> Config:
    """The settings with the model's directory, which may have to be fetched."""
    with report.check("model"):
        config = located(config)
        report.path = config.model.path
        if not os.path.isdir(report.path):
            raise no_directory(report.path)
        check_directory(report.path)
        # What is wrong with --disk-cache is reported as such, beside everything else.
        report.folder = open_folder(config.model, replace(config.load, disk_cache=None))
        report.ok("model", describe_folder(report))
    return config


def main(config: Config, *, explain: bool = False) -> int:
    """Print the report; returns 0, or the lowest exit code of the problems.

    ``explain``: the read plan as well, and the seconds it will take.
    """
    report = run_checks(config, device=fits_here, port=True)
    _check_files(report)
    _check_cache(config, report)
    check_room_for_copies(report)
    lines = [render(report, shown(config.model.model), columns=_columns())]
    if explain:
        from hotstart.cli.explain import explained

        lines += ["", *explained(config, report)]
    say("\n".join(lines))
    return ProblemsFound(report.problems).exit_code if report.problems else 0


def render(report: Report, model: str, *, columns: int | None = None) -> str:
    """The report as a table: one line for each check, advice below the failed ones, a verdict.

    ``columns``: of the terminal, where longer texts go on below their beginning; None: no terminal.
    """
    width = max((len(finding.name) for finding in report.findings), default=0)
    lines = [f"hotstart check {model}", ""]
    for finding in report.findings:
        lines += _hanging(f"  {finding.status:<4}  {finding.name:<{width}}  ", finding.text, columns)
        if finding.advice:
            lines += _hanging(f"        {'':<{width}}  -> ", finding.advice, columns)
    failed, warned = len(report.problems), len(report.warnings)
    verdict = f"{count(failed, 'problem')} found: it would not start" if failed else "ready to be served"
    lines += ["", verdict + (f" ({count(warned, 'warning')})" if warned else "")]
    return "\n".join(lines)


def located(config: Config, report: Callable[[int, int], None] | None = None) -> Config:
    """The settings with the model's directory, downloaded if it is a hub name.

    Of a model in an object store only the small files are fetched. ``report`` follows a download.
    Raises ConfigError, ModelError and StorageError.
    """
    model = config.model
    if model.path:
        return config
    if is_location(model.model):
        from hotstart.checkpoint.remote import fetch_small_files, open_store
        from hotstart.config import cache_root
        from hotstart.storage.variables import with_options

        root = cache_root.resolve(config.cache_root or None, os.environ)
        environ = with_options(os.environ, config.load.model_loader_extra_config)
        store = open_store(model.model, environ=environ, patience=config.load.storage_timeout)
        path = fetch_small_files(store, root.path if root.writable else "")
        store.close()
        model = replace(model, path=path, location=model.model)
    else:
        from hotstart.loading.by_format import hub_files

        files = None if is_path(model.model) else hub_files(config)
        model = replace(model, path=directory_of(config, model.model, model.revision, report, files))
    return replace(config, model=model)


def _hanging(head: str, text: str, columns: int | None) -> list[str]:
    import textwrap

    if columns is None:
        return [head + text]
    return textwrap.wrap(
        text,
        max(columns, len(head) + 20),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,  # paths and flags are to be copied
        break_on_hyphens=False,
    )


def _columns() -> int | None:
    return os.get_terminal_size(sys.stdout.fileno()).columns or None if sys.stdout.isatty() else None


def directory_of(
    config: Config,
    name: str,
    revision: str | None,
    report: Callable[[int, int], None] | None = None,
    files: Files | None = None,
) -> str:
    """The directory of a model or tokenizer, downloaded if it is a hub name.

    ``report`` follows a download, in bytes that came and bytes known of, in place of a bar. ``files`` are
    those that are wanted; None: the small ones, which a tokenizer needs.
    """
    model = config.model
    hub_cache = None
    if not is_path(name):
        from hotstart.checkpoint.hub import SMALL, Files
        from hotstart.config import cache_root

        files = files or Files(SMALL)
        root = cache_root.resolve(config.cache_root or None, os.environ)
        hub_cache = cache_root.hub_cache(root, os.environ)
    return resolve(
        name,
        revision=revision,
        token=model.hf_token,
        download_dir=model.download_dir,
        hub_cache=hub_cache,
        progress=config.log.use_tqdm_on_load,
        report=report,
        files=files,
    )


def _check_config(config: Config, report: Report) -> None:
    """config.json and the other small files; whether an architecture of ours is described well."""
    with report.check("config"):
        tokenizer = config.model.tokenizer
        if tokenizer is not None:
            tokenizer = directory_of(config, tokenizer, config.model.tokenizer_revision)
        report.files = load_model_files(
            report.path,
            shown=shown_folder(config.model),
            overrides=overrides_of(config.model),
            tokenizer=tokenizer,
        )
        from hotstart.models.registry import family_for

        family = family_for(report.files.config)
        geometry = family.geometry(report.files.config)
        report.family, report.geometry = family, geometry
        report.ok(
            "config",
            f"{geometry.architecture}, {geometry.num_layers} layers, "
            f"context of {geometry.max_position_embeddings} tokens",
        )


def _check_weights(config: Config, report: Report, opened: Callable[[Checkpoint], None]) -> None:
    """Files whole and readable (their headers are read), tensors as the configuration wants them."""
    if config.load.load_format == "dummy":
        report.skip("weights", "--load-format dummy: random weights, nothing is read")
        _imagine_weights(config, report)
        return
    with report.check("weights"):
        assert report.folder is not None
        from hotstart.loading.by_format import open_weights

        checkpoint = open_weights(report.folder, config)
        report.checkpoint = checkpoint
        opened(checkpoint)
        for line in describe(checkpoint):
            report.ok("weights", line)
        if not config.model.location:
            report.residency = {file.path: resident_fraction(file.path) for file in checkpoint.files}
            report.ok("page cache", _page_cache(report))
    if report.checkpoint is None or report.family is None or report.geometry is None:
        report.skip("tensors", "needs a configuration and whole weight files")
        return
    with report.check("tensors"):
        from hotstart.loading.by_format import match_weights

        matched = match_weights(report.family.specs(report.geometry), report.checkpoint, config)
        report.matched = matched
        report.ok("tensors", f"all {len(matched.loads)} found, {format_size(matched.nbytes)}")
        for note in matched.notes:
            report.ok("tensors", note)
        for warning in matched.warnings:
            report.warn("tensors", warning)
        report.ok("dtype", _dtypes(config, report, matched))
    if report.matched is not None and is_stream(config.load.load_format):
        from hotstart.cli.check_stream import handed_over

        refused = any((found.name, found.status) == ("loader", "fail") for found in report.findings)
        with report.check("loader"):
            told = handed_over(config, report.checkpoint, report.matched)
            if not refused:  # a library that is not there is told nothing
                report.ok("loader", told)


def _imagine_weights(config: Config, report: Report) -> None:
    """Random weights need as much memory as stored ones."""
    if report.files is None or report.family is None or report.geometry is None:
        return
    from hotstart.engine.assemble import without_files

    with report.check("tensors"):
        specs = report.family.specs(report.geometry)
        report.matched = without_files(specs, config, report.files)
        report.checkpoint = Checkpoint(report.path, (), {})


def _check_text(config: Config, report: Report) -> None:
    """Tokenizer, chat template and generation defaults."""
    if report.files is None:
        report.skip("text", "needs a configuration")
        return
    with report.check("text"):
        from hotstart.frontend.start import load_text

        report.text = load_text(report.files, config)
        for warning in report.text.warnings:
            report.warn("text", warning)
        if report.text.template is None:
            report.warn("text", report.text.no_template)
        else:
            report.ok(
                "text", f"tokenizer and chat template ({report.files.chat_template_source or 'as given'})"
            )


def _check_files(report: Report) -> None:
    """Serve asks before it checks anything."""
    with report.check("files"):
        from hotstart.cli.limits import raise_file_limit

        if few := raise_file_limit():
            report.warn("files", few)


def _check_cache(config: Config, report: Report) -> None:
    """Serve says the same by itself: it needs the place before it checks."""
    from hotstart.config import cache_root

    root = cache_root.resolve(config.cache_root or None, os.environ)
    (report.ok if root.writable else report.warn)("cache", root.reason)


def _page_cache(report: Report) -> str:
    share = report.resident
    if share is None:
        return "unknown (the kernel does not tell for files of other users)"
    return f"{share:.0%} of the weight files are in memory already"


def _dtypes(config: Config, report: Report, matched: Matched) -> str:
    """Stored, configured and used: a field missing from config.json must not decide silently."""
    from hotstart.loading.match import FLOATS

    stored = ", ".join(
        f"{FLOATS[name]} ({format_size(size)})" if len(matched.stored) > 1 else FLOATS[name]
        for name, size in matched.stored.items()
    )
    content: dict[str, Any] = report.files.config if report.files is not None else {}
    configured = content.get("dtype") or content.get("torch_dtype") or "nothing"
    by = "as stored" if config.model.dtype == "auto" else "--dtype"
    return f"stored {stored}; config.json says {configured}; used {matched.dtype} ({by})"


def fits_here(config: Config, report: Report) -> str:
    """The engine's own arithmetic, so that check and serve cannot disagree."""
    from hotstart.device import host
    from hotstart.device.choose import choose
    from hotstart.engine.assemble import Prepared, size_kv
    from hotstart.engine.placement import place

    assert report.files is not None
    assert report.checkpoint is not None
    assert report.family is not None
    assert report.geometry is not None
    assert report.matched is not None
    prepared = Prepared(
        config=config,
        files=report.files,
        family=report.family,
        geometry=report.geometry,
        checkpoint=report.checkpoint,
        matched=report.matched,
        placement=place(choose(config.device.device)),
    )
    used = prepared.placement.block_size(prepared)
    if used != config.cache.block_size:
        report.warn(
            "device",
            f"--block-size {config.cache.block_size} has no effect on the CPU: a sequence lies in one "
            f"piece, prefixes are reused in steps of {used} tokens, and --num-gpu-blocks-override counts "
            "these",
        )
    threads, cores = config.device.threads, host.cores()
    if threads is not None and threads > cores:  # they wait for each other some 150 times a token
        report.warn("device", f"--threads {threads} on {count(cores, 'core')} is slower than leaving it out")
    size = size_kv(prepared)
    return f"fits: KV cache of {size.tokens} tokens (--kv-cache-memory-bytes={size.bytes}): {size.reason}"


def _try_port(http: HttpConfig) -> str:
    """Listen for a moment, just as serve would. Raises ConfigError that names who holds the port."""
    from hotstart.cli.bind import UnixPath, bind, url

    shown = ""
    for listening in bind(http):
        with listening:
            unix_path = UnixPath(http.uds) if http.uds is not None else None
            shown = url(http, listening)
            if unix_path is not None:
                unix_path.remove()
    return f"{shown} is free"
