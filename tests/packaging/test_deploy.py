"""What the deployment page tells to copy is consistent with the server, and with itself."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotstart.config.parse import parse_serve
from hotstart.config.settings import HttpConfig
from hotstart.frontend import openapi

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/deploy.md", "docs/deploy.zh-CN.md")
STOPPING = HttpConfig().shutdown_timeout


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.+?)^```$", text, re.M | re.S)


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def unit(page: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(*blocks(page, "ini"))
    return parser


@pytest.fixture
def pod(page: str) -> dict[str, Any]:
    deployment, _ = yaml.safe_load_all(blocks(page, "yaml")[0])
    return dict(deployment["spec"]["template"]["spec"])


def test_both_languages_have_the_same_to_copy() -> None:
    for language in ("ini", "yaml"):
        assert blocks(PAGES[0], language) == blocks(PAGES[1], language)
    code = re.compile(r"`([^`\n]+)`")
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in PAGES)
    assert sorted(set(code.findall(english))) == sorted(set(code.findall(chinese)))


def test_unit_passes_flags_that_exist_and_waits_for_the_model(unit: configparser.ConfigParser) -> None:
    program, command, *words = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("hotstart", "serve")
    assert parse_serve(words, {}).model == unit["Unit"]["RequiresMountsFor"]
    assert float(unit["Service"]["TimeoutStopSec"]) > STOPPING


def test_pod_passes_flags_that_exist_and_has_the_model_at_that_path(pod: dict[str, Any]) -> None:
    [container] = pod["containers"]
    model = parse_serve(container["args"], {}).model
    paths = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    roots = [variable["value"] for variable in container["env"] if variable["name"] == "HOTSTART_CACHE_ROOT"]
    assert set(paths) == {model, *roots}
    assert set(paths.values()) == {volume["name"] for volume in pod["volumes"]}


def test_other_places_fit_into_the_pod(page: str, pod: dict[str, Any]) -> None:
    [container] = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    _, volumes, store = blocks(page, "yaml")
    for other in yaml.safe_load_all(volumes):
        assert {volume["name"] for volume in other["volumes"]} <= set(mounted)
    changed = yaml.safe_load(store)
    load = parse_serve(changed["args"], {}).config.load
    assert load.disk_cache is not None
    assert load.disk_cache.startswith(mounted["cache"])
    roots = [each["value"] for each in changed["env"] if each["name"] == "HOTSTART_CACHE_ROOT"]
    assert roots == [mounted["cache"]]


def test_pod_probes_paths_that_exist_and_outlives_its_requests(pod: dict[str, Any]) -> None:
    [container] = pod["containers"]
    probed = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness")]
    assert probed == ["/livez", "/readyz"]
    assert set(probed) <= set(openapi.document()["paths"])
    wait = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] > STOPPING + wait


def test_image_is_built_from_files_that_reach_it_and_serves_as_a_user() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in lines if re.match("COPY (?!--)", line) for word in line.split()[1:-1]}
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)
    assert "USER hotstart" in lines
    assert 'ENTRYPOINT ["hotstart", "serve"]' in lines
