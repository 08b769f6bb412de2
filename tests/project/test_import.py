"""`import hcp` prints nothing, starts nothing, and imports no package. Its names import torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hcp

CALLS = re.compile(r"torch\.ops\.hcp\.|\"hcp::")
LOADS = re.compile(r"^ *(from hcp import ops|from hcp\.ops import|import hcp\.ops)\b", re.MULTILINE)

PROBE = """
import json, sys
import torch, torch.distributed
before = set(sys.modules)
import hcp
names = [getattr(hcp, name) for name in hcp.__all__]
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "process_group": torch.distributed.is_initialized(),
    "cuda_context": torch.cuda.is_initialized(),
}))
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "default", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )


def probe(folder: Path) -> dict[str, object]:
    answer: dict[str, object] = json.loads(run(PROBE, folder).stdout)
    return answer


def test_import_prints_nothing(tmp_path: Path) -> None:
    # What torch says for itself, such as that numpy is missing, is not hcp's.
    alone = run("import torch, torch.distributed", tmp_path)
    both = run("import torch, torch.distributed; from hcp import *", tmp_path)
    assert (both.stdout, both.stderr) == (alone.stdout, alone.stderr)


def test_import_leaves_no_file(tmp_path: Path) -> None:
    run("import hcp", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_import_starts_no_process_group_and_no_cuda_context(tmp_path: Path) -> None:
    answer = probe(tmp_path)
    assert answer["process_group"] is False
    assert answer["cuda_context"] is False


def test_every_public_name_is_found_and_no_other(tmp_path: Path) -> None:
    code = (
        "import hcp; print(set(hcp.__all__) == set(hcp._HOME), set(hcp.__all__) <= set(dir(hcp)))"
    )
    assert run(code, tmp_path).stdout.split() == ["True", "True"]
    with pytest.raises(AttributeError, match="module 'hcp' has no attribute 'plam'"):
        hcp.plam  # type: ignore[attr-defined]  # noqa: B018


def test_import_brings_no_third_party_module_but_torch(tmp_path: Path) -> None:
    modules = probe(tmp_path)["modules"]
    assert isinstance(modules, list)
    strangers = {
        name
        for name in modules
        if name.partition(".")[0] not in {"hcp", "torch", *sys.stdlib_module_names}
    }
    assert strangers == set()


def test_import_does_not_load_the_demo_or_an_integration(tmp_path: Path) -> None:
    modules = probe(tmp_path)["modules"]
    assert isinstance(modules, list)
    assert [name for name in modules if name.startswith(("hcp.demo", "hcp.integrations"))] == []


def test_a_module_that_calls_the_operators_loads_them() -> None:
    # Names of hcp import at first use: another module may not have loaded the library before.
    package = Path(hcp.__file__).parent
    texts = {
        path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")
    }
    calling = {name for name, text in texts.items() if CALLS.search(text)}
    assert "exchange/connect.py" in calling
    assert {name for name in calling if not LOADS.search(texts[name])} == {"ops.py"}
