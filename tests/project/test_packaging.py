"""What installations and distributions of hcp hold: a command, a path, every file of the tree."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import hcp

ROOT = Path(__file__).resolve().parents[2]

COMPILER = """#!{python}
import sys
from pathlib import Path

Path(sys.argv[sys.argv.index("-o") + 1]).touch()
"""
"""It takes no time and compiles nothing."""


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout: which files belong to the tree is not known here")
    listed = run(ROOT, "git", "ls-files").splitlines()
    return [name for name in listed if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def tree(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because setuptools writes into the folder that it packs."""
    folder = tmp_path_factory.mktemp("tree")
    for name in tracked:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(folder: Path, *command: str | Path, **variables: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


# ---- the console command -------------------------------------------------------------------------


def test_the_console_command_says_the_version(tmp_path: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"hcp": "hcp.cli.commands:main"}
    command = Path(sys.executable).with_name("hcp")
    if not command.exists():
        pytest.skip("hcp is imported here without being installed: make test")
    assert run(tmp_path, command, "--version") == f"hcp {hcp.__version__}\n"


def test_the_command_is_that_of_the_distribution_and_its_code_is_an_exit_status() -> None:
    try:
        entries = metadata.distribution("hcp-torch").entry_points
    except metadata.PackageNotFoundError:
        pytest.skip("hcp is imported here without being installed: make test")
    (entry,) = entries.select(group="console_scripts")
    assert (entry.name, entry.load()(["--version"]), entry.load()(["nonsense"])) == ("hcp", 0, 2)


# ---- editable installs ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def editable(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install -e .` puts into an environment."""
    folder = tmp_path_factory.mktemp("editable")
    compiler = folder / "compiler"
    compiler.write_text(COMPILER.format(python=sys.executable))
    compiler.chmod(0o755)
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    tools = {"CC": str(compiler), "CXX": str(compiler), "NVCC": ""}
    run(tree, sys.executable, "-c", build, folder, **tools)
    (wheel,) = folder.glob("*.whl")
    installed = folder / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    return installed


def test_an_editable_install_is_a_path_and_no_import_hook(editable: Path, tree: Path) -> None:
    (path,) = editable.glob("*.pth")
    assert path.read_text().split() == [str(tree)]
    assert list(editable.glob("*.py")) == []


def test_mypy_finds_an_editable_install(editable: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="make check installs it")
    venv.create(tmp_path / "environment", with_pip=False)
    python = tmp_path / "environment/bin/python"
    site = run(tmp_path, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    (tmp_path / "user.py").write_text("import hcp\n\nhcp.plan\n")
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip"]
    command += [f"--python-executable={python}", f"--cache-dir={tmp_path / 'cache'}", "user.py"]
    alone = subprocess.run(
        command, cwd=tmp_path, env=without_paths(), capture_output=True, text=True
    )
    assert 'named "hcp"' in alone.stdout, alone
    shutil.copytree(editable, site.strip(), dirs_exist_ok=True)
    found = subprocess.run(
        command, cwd=tmp_path, env=without_paths(), capture_output=True, text=True
    )
    assert found.returncode == 0, found


def without_paths() -> dict[str, str]:
    hidden = {"PYTHONPATH", "MYPYPATH"}
    return {name: value for name, value in os.environ.items() if name not in hidden}


# ---- the source distribution ---------------------------------------------------------------------

MADE = ("PKG-INFO", "setup.cfg", "hcp_torch.egg-info/")


def test_a_source_distribution_is_the_tree(tree: Path, tracked: list[str], tmp_path: Path) -> None:
    run(tree, sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.name == f"hcp_torch-{hcp.__version__}.tar.gz"
    with tarfile.open(archive) as packed:
        names = [each.name.partition("/")[2] for each in packed.getmembers() if each.isfile()]
    assert sorted(name for name in names if not name.startswith(MADE)) == sorted(tracked)
    assert {name.partition("/")[0] for name in names} >= {"benchmarks", "docs", "examples", "tests"}


# ---- the matrix ----------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["", "exit 1", "exec {python} -c 'exit(1)'"])
def test_the_matrix_takes_one_working_interpreter_of_each_release(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`broken` is what a command of a version manager does for a release that is not chosen."""
    working = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, release, text in (
        (first, "python3.12", f"#!/bin/sh\n{broken.format(python=sys.executable)}\n"),
        (second, "python3.12", working),
        (second, "python3.14", working),
        (second, "python3.10", working),
    ):
        folder.mkdir(exist_ok=True)
        if text != "#!/bin/sh\n\n":
            (folder / release).write_text(text)
            (folder / release).chmod(0o755)
    monkeypatch.setenv("PATH", f"{first}{os.pathsep}{second}")
    found = runpy.run_path(str(ROOT / ".github/matrix.py"))["found_pythons"]()
    assert found == [f"{second}/python3.12", f"{second}/python3.14"]
