"""A function with the signature of Megatron-LM's evaluation loop, and the accepted versions of
trainers."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from argparse import Namespace
from pathlib import Path

import pytest
from support import trainer
from support.ranks import run_ranks

import hcp
from hcp import _versions as versions
from hcp._versions import check_if_installed, require
from hcp.integrations.megatron import wrap_evaluate


def evaluate_as_megatron_lm_does(rank, size):
    train = hcp.build_process_groups()
    evaluation = train.with_context_parallel(2)
    model, _ = trainer.build(train)
    args = Namespace(data_parallel_size=2, context_parallel_size=1, eval_global_batch_size=4)
    samples = trainer.samples_of(5)

    def evaluate(forward_step_func, data_iterator, model, process_non_loss_data_func=None):
        micro_batches = args.eval_global_batch_size // args.data_parallel_size
        if forward_step_func == "fail":
            raise ZeroDivisionError
        return micro_batches, args.context_parallel_size, trainer.evaluate(model[0], samples, 1)

    wrapped = wrap_evaluate(evaluate, train, evaluation, args, strict=True)
    assert wrapped.__name__ == "evaluate"
    plain, switched = evaluate(None, None, [model]), wrapped(None, None, model=[model])
    assert (plain[:2], switched[:2]) == ((2, 1), (4, 2))
    assert abs(plain[2].mean / switched[2].mean - 1) < 1e-12
    with pytest.raises(ZeroDivisionError):
        wrapped("fail", None, [model])
    assert (args.data_parallel_size, args.context_parallel_size, model.cp_size) == (2, 1, 1)
    with pytest.raises(ValueError, match=r"args\.data_parallel_size is 4, expected .*, 2"):
        wrap_evaluate(evaluate, train, evaluation, Namespace(data_parallel_size=4))
    with pytest.raises(ValueError, match="has the parameters x, expected one called model"):
        wrap_evaluate(lambda x: x, train, evaluation)


def test_a_megatron_lm_style_evaluate_runs_under_the_eval_layout():
    run_ranks(2, evaluate_as_megatron_lm_does)


@pytest.mark.parametrize(("ranks", "spread"), [(None, False), (1, False), (2, True)])
def test_megatrons_plans_know_whether_experts_are_waited_for(ranks, spread):
    """Found in the trainer's groups, as `Config.sync` "auto" asks."""
    from hcp.integrations.barrier import _spreads_experts_over

    group = None if ranks is None else Namespace(size=lambda: ranks)
    assert _spreads_experts_over(Namespace(source=Namespace(ep=group))) == spread


# ---- versions ------------------------------------------------------------------------------------

INTEGRATIONS = {
    "accelerate": ("import hcp.integrations.accelerate", "1.10.1"),
    "lightning": ("import hcp.integrations.lightning", "2.5.9"),
    "megatron-core": ("from hcp.integrations.megatron import hcp_layer_spec", "0.15.3"),
    "torchtitan": ("import hcp.integrations.torchtitan", "0.2.2"),
    "transformers": ("import hcp.integrations.transformers", "5.5.4"),
}
"""The entry of each integration, and a version that it refuses."""

EXPECTED = {
    "accelerate": "expected 1.11.0 or 1.15.0, which hcp was tested with: "
    'pip install "accelerate>=1.11"',
    "lightning": 'expected 2.6.6, which hcp was tested with: pip install "lightning>=2.6"',
    "megatron-core": "expected 0.16.1 or 0.19.2, which hcp was tested with: "
    'pip install "megatron-core>=0.16"',
    "torchtitan": 'expected 0.3.0, which hcp was tested with: pip install "torchtitan>=0.3"',
    "transformers": "expected 5.6.2, 5.12.1, 5.17.0, 5.23.0 or 5.24.0, which hcp was tested with: "
    'pip install "transformers>=5.6"',
}

ENTER = """
import json, sys
said = {}
for package, line in json.loads(sys.argv[1]).items():
    try:
        exec(line)
    except ImportError as error:
        one = error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
        said[package] = [type(error).__name__, str(error), one]
print(json.dumps(said))
"""
FOLDERS = {"megatron-core": "megatron"}


def enter_without(packages, entered, folder):
    """The errors of integrations in a process that lacks these installed packages.

    Returns (name of the error, its text, whether it is the only one). `folder`: others."""
    hidden = {FOLDERS.get(p, p) for p in packages}
    for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(path).iterdir():
            package = re.split(r"-[0-9]", entry.name)[0].replace("_", "-")
            if not {package, entry.name} & {*hidden, *packages} and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    lines = {package: INTEGRATIONS[package][0] for package in entered}
    done = subprocess.run(
        [sys.executable, "-S", "-c", ENTER, json.dumps(lines)],
        env={**os.environ, "PYTHONPATH": f"{folder}:{Path(hcp.__file__).parents[1]}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_package_that_is_not_there_gives_one_error_that_says_what_to_install(tmp_path):
    assert enter_without(INTEGRATIONS, INTEGRATIONS, tmp_path) == {
        package: ["ImportError", f"{package} is not installed, {expected}", True]
        for package, expected in EXPECTED.items()
    }


def test_another_version_gives_one_error_that_says_what_to_install(tmp_path):
    for package, (_, version) in INTEGRATIONS.items():
        metadata = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    # Of Megatron-Core what would be imported counts, which may be a checkout.
    checkout = tmp_path / "megatron" / "core" / "package_info.py"
    checkout.parent.mkdir(parents=True)
    checkout.write_text("__version__ = '0.15.3'\n")
    assert enter_without(INTEGRATIONS, INTEGRATIONS, tmp_path) == {
        package: ["ImportError", f"{package} is {INTEGRATIONS[package][1]}, {expected}", True]
        for package, expected in EXPECTED.items()
    }


def test_transformers_without_accelerate_says_what_to_install(tmp_path):
    pytest.importorskip("transformers")
    said = enter_without(["accelerate"], ["transformers"], tmp_path)
    text = f"accelerate is not installed, {EXPECTED['accelerate']}"
    assert said == {"transformers": ["ImportError", text, True]}


def test_transformer_engine_that_is_not_there_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.delitem(
        sys.modules, "hcp.integrations.transformer_engine.transformer_engine_handler", raising=False
    )
    with pytest.raises(
        ImportError, match=r"transformer_engine cannot be imported .*: python -m pip install"
    ):
        importlib.import_module("hcp.integrations.transformer_engine.transformer_engine_handler")


SEAM = "textwrap:TextWrapper.fill(text)"


@pytest.fixture
def installed(monkeypatch):
    """Say which version of a trainer is installed; 2.6.0 and 2.9.1 were tested."""
    monkeypatch.setitem(versions.TESTED, "trainer", ("2.6.0", "2.9.1"))
    monkeypatch.setattr(versions, "_warned", set())
    return lambda version: monkeypatch.setattr(versions, "installed", {"trainer": version}.get)


@pytest.mark.parametrize("version", ["2.6", "2.6.7", "2.9.0", "2.9.2+cu130", "2.9.1.post1"])
def test_patch_releases_of_a_tested_version_are_taken_in_silence(installed, version, caplog):
    installed(version)
    require("trainer", ["no:seam"], check="check it")
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["2.5.9", "2.5.10rc1", "0.10", "unknown"])
def test_an_older_version_is_refused_with_what_to_install(installed, version, caplog):
    installed(version)
    with pytest.raises(ImportError) as error:
        require("trainer", [SEAM], check="check it", needed_by="here")
    assert str(error.value) == (
        f"trainer is {version}, expected 2.6.0 or 2.9.1, which hcp was tested with: "
        'pip install "trainer>=2.6"'
    )
    assert error.value.name == "here"
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["2.7.0", "2.10.0rc1", "3.0"])
def test_a_version_that_was_not_tested_warns_once_in_a_process(installed, version, caplog):
    installed(version)
    for check in ("check it", "check it again"):
        require("trainer", [SEAM], check=check)
    assert caplog.messages == [
        f"hcp was tested with trainer 2.6.0 and 2.9.1; this is {version}. "
        "What hcp uses of it is there. check it"
    ]


def test_a_version_that_was_not_tested_is_refused_by_what_it_lacks(installed, caplog):
    installed("2.10.0")
    lacking = ["textwrap:TextWrapper.fill(columns)", "textwrap:Wrapper", "textwarp:TextWrapper"]
    said = f"trainer is 2.10.0, which has no {', '.join(lacking)}, which hcp uses: expected 2.6.0"
    with pytest.raises(ImportError, match=f"^{re.escape(said)}.* pip install trainer==2.9.1$"):
        require("trainer", [SEAM, *lacking], check="check it")
    assert caplog.messages == []


def test_a_part_of_hcp_that_needs_a_later_version_is_refused_by_what_is_lacking(installed):
    installed("2.9.1")
    versions.require_seams("trainer", [SEAM], since="2.9", needed_by="Part")
    with pytest.raises(
        ImportError, match=r"^trainer is 2\.9\.1, which has no textwrap:Wrapper, wh"
    ):
        versions.require_seams("trainer", [SEAM, "textwrap:Wrapper"], since="3.0", needed_by="Part")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.9.1", r'ImportError: torch is 2\.9\.1, expected 2\.10\.0, .* "torch>=2\.10"\n$'),
        ("2.99.0", r"^hcp was tested with torch 2\.10\.0, .*; this is 2\.99\.0\. Try your build"),
        ("2.13.0", "^$"),
    ],
)
def test_the_version_of_torch_is_checked_where_the_operators_load(version, said):
    code = f"import torch; torch.__version__ = {version!r}; import hcp.ops"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search(said, done.stderr), done.stderr


def test_a_package_that_hcp_works_without_is_checked_only_if_it_is_there(installed, caplog):
    installed(None)
    check_if_installed("trainer", check="check it")
    with pytest.raises(ImportError, match=r"^trainer is not installed, expected 2.6.0 or 2.9.1"):
        require("trainer", check="check it")
    installed("2.10.0")
    check_if_installed("trainer", check="check it")
    assert caplog.messages == [
        "hcp was tested with trainer 2.6.0 and 2.9.1; this is 2.10.0. check it"
    ]
    installed("2.5.0")
    with pytest.raises(ImportError, match=r"^trainer is 2.5.0, expected"):
        check_if_installed("trainer", check="check it")


@pytest.mark.parametrize(
    "package",
    ["accelerate", "deepspeed", "lightning", "megatron-core", "torchtitan", "transformers"],
)
def test_the_seams_of_a_trainer_are_in_the_version_that_was_tested(package):
    """Else they would refuse every other version."""
    name = {"megatron-core": "megatron.versions"}.get(package, package)
    if importlib.util.find_spec(package.split("-")[0]) is None:
        pytest.skip(f"{package} is not installed")
    module = importlib.import_module(f"hcp.integrations.{name}")
    assert [seam for seam in module.SEAMS if not versions.has_seam(seam)] == []
