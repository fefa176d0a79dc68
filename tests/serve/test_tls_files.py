"""The files of ``--ssl-*``: what is wrong with them is said by name, beside everything else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

import hub_stand_in
import tiny_models
from checkpoint_files import write_model
from engine_faults import SLOW_CHECKS, frontend_fault
from hotstart.cli.main import main
from running_server import run_to_end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("whole") / "model", vocab_size=tiny_models.VOCAB)
    tiny_models.write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate with its key, the authority's, another key, and things that are neither."""
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued, other = authority.issue_cert("127.0.0.1"), authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    other.private_key_pem.write_to_path(directory / "other.pem")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    (directory / "encrypted.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    (directory / "text.pem").write_text("no PEM at all\n")
    return directory


def flags(files: Path, certificate: str, key: str) -> list[str]:
    return ["--ssl-certfile", str(files / certificate), "--ssl-keyfile", str(files / key)]


def authorities(files: Path, name: str) -> list[str]:
    return ["--ssl-ca-certs", str(files / name), "--ssl-cert-reqs", "2"]


def test_a_certificate_and_its_key_pass(model: Path, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = flags(files, "cert.pem", "key.pem")
    assert main(["check", str(model), "--port", "0", *given, *authorities(files, "ca.pem")]) == 0
    assert f"{files}/cert.pem and its key {files}/key.pem" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("certificate", "key", "texts"),
    [
        ("absent.pem", "key.pem", ["--ssl-certfile", "absent.pem cannot be read: No such file"]),
        ("text.pem", "key.pem", ["--ssl-certfile", "text.pem holds no usable certificate"]),
        ("key.pem", "cert.pem", ["key.pem holds no usable certificate"]),
        ("cert.pem", "absent.pem", ["--ssl-keyfile", "absent.pem cannot be read: No such file"]),
        ("cert.pem", "", ["--ssl-keyfile", "cannot be read: Is a directory"]),
        ("cert.pem", "text.pem", ["--ssl-keyfile", "text.pem and --ssl-certfile"]),
        ("cert.pem", "other.pem", ["other.pem and --ssl-certfile", "key values mismatch"]),
        ("cert.pem", "encrypted.pem", ["encrypted.pem is encrypted", "openssl pkey -in"]),
        ("absent.pem", "gone.pem", ["absent.pem cannot be read", "gone.pem cannot be read"]),
    ],
)
def test_check_names_the_file_that_cannot_be_used(
    model: Path,
    files: Path,
    capsys: pytest.CaptureFixture[str],
    certificate: str,
    key: str,
    texts: list[str],
) -> None:
    assert main(["check", str(model), "--port", "0", *flags(files, certificate, key)]) == 2
    out = capsys.readouterr().out
    for text in texts:
        assert text in out


def test_authorities_that_are_no_certificates_are_named(
    model: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*flags(files, "cert.pem", "key.pem"), *authorities(files, "text.pem")]
    assert main(["check", str(model), "--port", "0", *given]) == 2
    assert f"--ssl-ca-certs {files}/text.pem holds no usable certificate" in capsys.readouterr().out


def test_a_bad_certificate_and_a_missing_model_are_reported_together(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = flags(files, "text.pem", "key.pem")
    assert main(["check", str(tmp_path / "nowhere"), "--port", "0", *given]) == 2
    out = capsys.readouterr().out
    assert "text.pem holds no usable certificate" in out
    assert "2 problems found" in out


def test_serve_ends_at_once_with_the_files_named(model: Path, files: Path) -> None:
    code, output = run_to_end(model, *flags(files, "cert.pem", "other.pem"))
    assert code == 2
    assert "other.pem" in output
    assert "Traceback" not in output


def test_serve_reports_a_bad_key_with_everything_else_however_long_the_checks_take(
    model: Path, files: Path, tmp_path: Path
) -> None:
    given = [
        *flags(files, "cert.pem", "encrypted.pem"),
        "--override-generation-config",
        '{"temperature": -1}',
    ]
    code, output = run_to_end(model, *given, env=frontend_fault(tmp_path, SLOW_CHECKS))
    assert code == 2
    assert "encrypted.pem is encrypted" in output
    assert "sets temperature to -1" in output


def test_a_bad_key_ends_a_start_whose_storage_hangs(model: Path, files: Path, tmp_path: Path) -> None:
    hangs = SLOW_CHECKS.replace("time.sleep(1.0)", "time.sleep(300)")
    code, output = run_to_end(
        model, *flags(files, "cert.pem", "encrypted.pem"), env=frontend_fault(tmp_path, hangs)
    )
    assert code == 2
    assert "encrypted.pem is encrypted" in output


def test_a_download_does_not_begin_with_files_that_cannot_be_served_with(files: Path, tmp_path: Path) -> None:
    with hub_stand_in.serve(hub_stand_in.Hub("org/tiny", {"config.json": b"{}"})) as hub:
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
        code, output = run_to_end("org/tiny", *flags(files, "cert.pem", "other.pem"), env=env)
    assert (code, hub.requests) == (2, [])
    assert "other.pem" in output


@pytest.mark.parametrize("flag", ["--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"])
def test_a_pipe_is_refused_instead_of_waited_at(
    flag: str, model: Path, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    given = [*flags(files, "cert.pem", "key.pem"), *authorities(files, "ca.pem")]
    given[given.index(flag) + 1] = str(tmp_path / "pipe")
    assert main(["check", str(model), "--port", "0", *given]) == 2
    assert f"{flag} {tmp_path}/pipe cannot be read: it is no regular file" in capsys.readouterr().out
