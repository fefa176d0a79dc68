"""``make lint`` tells a README whose start was measured before the last release."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = "<!-- timeline: written by scripts/readme_timeline.py{} -->\n```text\nx\n```\n<!-- /timeline -->\n"


@pytest.fixture
def lint(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import lint_timeline

    return lint_timeline


class Project:
    """A repository with the two pages and some code."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "src/hotstart").mkdir(parents=True)
        self.git("init", "-q")
        self.commit = self.change("src/hotstart/a.py")
        self.name(f" at {self.commit[:10]}")

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", *identity, *words]
        return subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True).stdout

    def change(self, file: str) -> str:
        """Change a file; the commit."""
        path = self.root / file
        path.write_text(path.read_text() + "x\n" if path.exists() else "x\n")
        self.git("add", ".")
        self.git("commit", "-q", "-m", file)
        return self.git("rev-parse", "HEAD").strip()

    def name(self, english: str, chinese: str | None = None) -> None:
        (self.root / "README.md").write_text(BLOCK.format(english))
        (self.root / "README.zh-CN.md").write_text(BLOCK.format(english if chinese is None else chinese))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def judged(lint: Any, project: Project) -> Callable[[], tuple[str, str]]:
    """The problem, and the remark."""
    return lambda: lint.judged(project.root)


def test_pages_of_this_repository_pass(lint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint.main() == 0
    assert "timeline: measured at " in capsys.readouterr().out


def test_without_a_tag_there_is_nothing_to_compare_with(
    project: Project, judged: Callable[[], tuple[str, str]]
) -> None:
    assert judged() == ("", f"measured at {project.commit[:10]}; there is no tag to compare with")


def test_commit_of_the_tag_or_a_newer_one_passes(
    project: Project, judged: Callable[[], tuple[str, str]]
) -> None:
    project.git("tag", "v1")
    assert judged() == ("", f"measured at {project.commit[:10]}, not before v1")
    newer = project.change("src/hotstart/a.py")
    project.name(f" at {newer}")
    assert judged() == ("", f"measured at {newer}, not before v1")


def test_release_that_changes_only_pages_and_version_passes(
    project: Project, judged: Callable[[], tuple[str, str]]
) -> None:
    project.change("src/hotstart/__init__.py")
    project.git("tag", "v1")
    assert judged() == ("", f"measured at {project.commit[:10]}, which runs the code of v1")


def test_commit_before_the_code_of_the_tag_is_a_problem(
    lint: Any, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.change("src/hotstart/a.py")
    project.git("tag", "v1")
    assert lint.main(project.root) == 1
    problem = capsys.readouterr().err
    assert f"measured at {project.commit[:10]}, and v1 runs other code" in problem
    assert "python scripts/readme_timeline.py" in problem


@pytest.mark.parametrize(
    ("english", "chinese", "problem"),
    [
        ("", None, "the block of README.md, README.zh-CN.md names no commit"),
        (" at abc123", "", "the block of README.zh-CN.md names no commit"),
        (" at abc123", " at abc124", "README.md and README.zh-CN.md name different commits"),
        (" at abc123", None, "the READMEs name commit abc123, which is not in the history"),
    ],
)
def test_block_that_names_no_commit_of_the_history_is_a_problem(
    project: Project,
    judged: Callable[[], tuple[str, str]],
    english: str,
    chinese: str | None,
    problem: str,
) -> None:
    project.name(english, chinese)
    assert judged()[0].startswith(problem)


def test_shallow_clone_cannot_tell(
    lint: Any, project: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    project.change("src/hotstart/a.py")
    clone = tmp_path_factory.mktemp("clone")
    subprocess.run(
        ["git", "clone", "-q", "--depth", "1", project.root.as_uri(), str(clone)],
        check=True,
        capture_output=True,
    )
    assert lint.judged(clone) == (
        "",
        f"measured at {project.commit[:10]}, which this shallow clone does not have",
    )
