"""Workflows, versions and metadata agree with the Makefile and pyproject.toml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest

import hcp
from hcp._versions import TESTED, numbers

ROOT = Path(__file__).resolve().parents[2]
HEADER, PARTS = "csrc/include/hcp/hcp.h", ("MAJOR", "MINOR")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
MAKEFILE = (ROOT / "Makefile").read_text()


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def matrix_of(text: str, job: str) -> dict[str, list[str]]:
    yaml = pytest.importorskip("yaml")
    matrix: dict[str, list[str]] = yaml.safe_load(text)["jobs"][job]["strategy"]["matrix"]
    return matrix


def trainer_jobs(text: str) -> set[tuple[str, str]]:
    """Trainers that a workflow tests, each with its edge."""
    matrix = matrix_of(text, "trainer")
    more: list[dict[str, str]] = matrix["include"]  # type: ignore[assignment]
    return {*product(matrix["name"], matrix["edge"])} | {(x["name"], x["edge"]) for x in more}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_yaml_with_jobs_that_have_steps(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(path.read_text())["jobs"]
    assert jobs
    assert all(job["runs-on"] and job["steps"] for job in jobs.values())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_make_targets_that_exist(path: Path) -> None:
    text = path.read_text()
    called = set(re.findall(r"\bmake ([a-z-]+)(?!\S*\$)", text))
    if "make test-trainer-${{ matrix.name }}" in text:
        called |= {f"test-trainer-{name}" for name, _ in trainer_jobs(text)}
    targets = set(re.findall(r"^([a-z_-]+):(?!=)", MAKEFILE, re.MULTILINE))
    assert called
    extras = PROJECT["optional-dependencies"]
    assert called <= targets | {f"test-trainer-{extra}" for extra in extras}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_uses_official_actions_by_version_and_no_host(path: Path) -> None:
    text = path.read_text()
    uses = re.findall(r"uses: (\S+)", text)
    assert uses
    official = r"actions/[a-z-]+@v\d+|pypa/gh-action-pypi-publish@release/v1"
    assert all(re.fullmatch(official, action) for action in uses)
    assert "://" not in text


EDGES = ["oldest", "pinned", "newest"]


def test_torch_and_each_trainer_are_tested_at_the_oldest_the_pinned_and_the_newest_version() -> (
    None
):
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    core = matrix_of(text, "test")
    assert core["python"][0] == PROJECT["requires-python"].removeprefix(">=")
    assert core["edge"] == EDGES
    listed = re.search(r"(?m)^TRAINERS \?= (.*)$", MAKEFILE)
    assert listed
    trainers = set(listed[1].split())
    with_one = {name for name in trainers if name.replace("_", "-") not in AT_EDGES}
    with_one.add("megatron_lm")  # Its wheel is Megatron-Core's.
    expected = {*product(trainers - with_one, EDGES), *product(with_one, ["pinned"])}
    assert trainer_jobs(text) == expected


AT_EDGES = {*TESTED} - {"megatron-core"} | {"megatron"}


def edge(*arguments: str) -> list[str]:
    command = [sys.executable, ".github/extras.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def test_an_edge_is_a_tested_version_or_none() -> None:
    first, *_, last = TESTED["transformers"]
    for name, versions in (("oldest", f"=={first}"), ("pinned", f"=={last}"), ("newest", ">=")):
        line = edge("--edge", name, "transformers")[0]
        assert line.startswith(f"transformers{versions}")
    assert edge("--edge", "newest", "--package", "torch") == ["torch"]
    assert edge("--edge", "oldest", "--package", "torch") == [f"torch=={TESTED['torch'][0]}"]
    (kernel,) = (x for x in edge("kernels", "--edge", "oldest") if x.startswith("nvidia"))
    assert kernel.endswith("; sys_platform == 'linux' and platform_machine == 'x86_64'")


def test_requirements_start_at_the_oldest_tested_version_and_have_no_cap() -> None:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for extra in extras.values() for line in extra)]
    floors = {}
    for line in lines:
        name, floor = re.split("(?=[<>=;\\[])", line.replace(" ", ""), maxsplit=1)
        if name in TESTED:
            floors[name] = floor.partition(";")[0]
    oldest = {name: ".".join(versions[0].split(".")[:2]) for name, versions in TESTED.items()}
    assert floors == {name: f">={oldest[name]}" for name in floors}
    assert {*TESTED} - {*floors} == {"megatron-core", "torchtitan"}  # They are no extras.


def test_what_the_makefile_pins_was_tested() -> None:
    pins = re.findall(r"\b([\w-]+)==(\d[\d.]*)", MAKEFILE.partition("# ---- Wheels")[0])
    found = {name: version for name, version in pins if name in TESTED}
    assert found["torch"]
    for name, version in found.items():
        assert number(version) in map(number, TESTED[name]), name
    listed = re.search(r"(?m)^TORCHES \?= (.*)$", MAKEFILE)
    assert listed
    assert tuple(listed[1].split()) == TESTED["torch"]


def test_tested_versions_ascend() -> None:
    for versions in TESTED.values():
        assert sorted(versions, key=numbers) == [*versions]


def test_the_page_of_support_has_the_tested_versions() -> None:
    page = (ROOT / "docs/reference/support.md").read_text()
    rows = re.findall(r"(?m)^\| `([\w-]+)` \| ([^|]*) \|", page)
    assert {name: tuple(re.split(", ", cell)) for name, cell in rows} == TESTED


def test_pyproject_reads_the_version_where_hcp_has_it() -> None:
    assert "version" in PROJECT["dynamic"]
    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "hcp._version.__version__"}


@pytest.mark.parametrize("known", [True, False])
def test_a_build_of_a_workflow_names_its_repository(known: bool, tmp_path: Path) -> None:
    named = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "team/hcp"}
    environment = {name: value for name, value in os.environ.items() if name not in named}
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "dist_info", "--output-dir", str(tmp_path)],
        cwd=ROOT,
        env=environment | (named if known else {}),
        check=True,
        capture_output=True,
    )
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    found = re.findall(r"^Project-URL: (\w+), (\S+)$", metadata.read_text(), re.MULTILINE)
    assert dict(found).keys() == (
        {"Homepage", "Documentation", "Changelog", "Issues"} if known else set()
    )
    assert all(url.startswith("https://example.org/team/hcp") for _, url in found)


def test_the_citation_has_the_version_of_hcp() -> None:
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited
    assert cited[1] == hcp.__version__


def test_the_pages_of_support_name_the_newest_minor_release() -> None:
    pages = "SECURITY.md", "docs/reference/support.md"
    named = {
        re.findall(r"newest release, (\d+\.\d+),", (ROOT / page).read_text())[0] for page in pages
    }
    assert len(named) == 1
    assert number(named.pop()) >= number(hcp.__version__)


def test_the_header_of_the_core_is_of_the_same_release() -> None:
    assert number(header_version(ROOT)) == number(hcp.__version__)[:2]


def header_version(folder: Path) -> str:
    text = (folder / HEADER).read_text()
    parts = [re.findall(rf"(?m)^#define HCP_VERSION_{part} (\d+)$", text) for part in PARTS]
    return ".".join(found for (found,) in parts)


def test_extras_name_the_distribution_and_not_its_namesake() -> None:
    extras = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    assert PROJECT["name"] == "hcp-torch"
    assert any(line.startswith("hcp-torch[") for line in extras)
    assert not any(re.match(r"hcp\b(?!-torch)", line) for line in extras)


def test_the_paths_that_want_a_reviewer_exist() -> None:
    lines = (ROOT / ".github/CODEOWNERS").read_text().splitlines()
    paths = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert paths
    assert [path for path in paths if not (ROOT / path.lstrip("/")).exists()] == []


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A repository of the files that a release writes."""
    files = "hcp/_version.py", "CITATION.cff", "docs/card.yaml", "CHANGELOG.md", "SECURITY.md"
    scripts = ".github/release.py", ".github/notes.py"
    files = *files, *scripts, "docs/reference/support.md", HEADER
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    add_change(tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "Tests")
    git(tmp_path, "config", "user.email", "tests@localhost")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "before")
    return tmp_path


def add_change(folder: Path) -> None:
    """A change that is not released: a tree just after a release has none."""
    path = folder / "CHANGELOG.md"
    title = "## [Unreleased]\n"
    path.write_text(path.read_text().replace(title, f"{title}\n- A change.\n", 1))


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def release(folder: Path, *versions: str) -> str:
    """What it says, with its exit code where that is not 0."""
    return run(folder, ".github/release.py", *versions)


def run(folder: Path, *command: str) -> str:
    """What a script says, with its exit code where that is not 0."""
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    return f"{done.returncode or ''}{done.stdout}{done.stderr}"


def test_a_release_is_one_version_in_all_files_and_a_tag(released: Path) -> None:
    assert "v9.8.7" in release(released, "9.8.7")
    assert git(released, "describe", "--exact-match").strip() == "v9.8.7"
    assert '"9.8.7"' in (released / "hcp/_version.py").read_text()
    for name in ("CITATION.cff", "docs/card.yaml"):
        assert "version: 9.8.7\n" in (released / name).read_text()
    for name in ("SECURITY.md", "docs/reference/support.md"):
        assert "newest release, 9.8," in (released / name).read_text()
    assert header_version(released) == "9.8"
    changes = (released / "CHANGELOG.md").read_text()
    assert re.search(r"## \[Unreleased\]\n\n## \[9\.8\.7\] - \d{4}-\d\d-\d\d\n", changes)
    assert git(released, "status", "--porcelain") == ""
    assert release(released, "9.8.7").startswith("1the tag v9.8.7 exists")
    assert release(released, "9.8.8").startswith("1CHANGELOG.md has nothing")
    assert git(released, "status", "--porcelain") == ""


def test_the_notes_of_a_release_are_its_section_of_the_changelog(released: Path) -> None:
    before = run(released, ".github/notes.py", f"v{hcp.__version__}")
    assert "A change." not in before
    release(released, "9.8.7")
    notes = run(released, ".github/notes.py", "v9.8.7")
    assert notes.startswith("- A change.\n")
    assert "\n## " not in notes
    other = run(released, ".github/notes.py", "v9.8.6")
    assert other.startswith("1the tag is v9.8.6, and hcp/_version.py has ['9.8.7'], expected")


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://example.org/team/hcp.git", "https://example.org/team/hcp"),
        ("https://name:word@example.org/team/hcp", "https://example.org/team/hcp"),
        ("git@example.org:team/hcp.git", "https://example.org/team/hcp"),
        ("ssh://git@example.org/team/hcp.git", "https://example.org/team/hcp"),
        ("/somewhere/hcp", None),
        (None, None),
    ],
)
def test_a_release_dates_the_citation_and_names_the_repository(
    released: Path, remote: str | None, address: str | None
) -> None:
    if remote:
        git(released, "remote", "add", "origin", remote)
    for version in ("9.8.7", "9.9.0"):
        assert f"v{version}" in release(released, version)
        cited = (released / "CITATION.cff").read_text()
        assert f"\nversion: {version}\ndate-released: 20" in cited
        assert re.findall(r"(?m)^date-released: \d{4}-\d\d-\d\d$", cited) != []
        named = re.findall(r'(?m)^repository-code: "(.*)"$', cited)
        assert named == ([address] if address else [])
        add_change(released)
        git(released, "commit", "--quiet", "--all", "--message", "a change")


def test_a_release_of_an_uncommitted_tree_or_of_no_version_is_refused(released: Path) -> None:
    assert release(released).startswith("1the arguments are []")
    assert release(released, "v1").startswith("1the arguments are ['v1']")
    (released / "CITATION.cff").write_text("")
    assert release(released, "9.8.7").startswith("1the tree has changes")
