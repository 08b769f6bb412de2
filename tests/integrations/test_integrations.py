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
from hcp.integrations.megatron import wrap_evaluate
from hcp.programs import versions
from hcp.programs.versions import require, require_one_of


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
    from hcp.integrations.megatron.data import _spreads_experts

    group = None if ranks is None else Namespace(size=lambda: ranks)
    assert _spreads_experts(Namespace(source=Namespace(ep=group))) == spread


# ---- versions ------------------------------------------------------------------------------------

INTEGRATIONS = {
    "accelerate": ("import hcp.integrations.accelerate", "1.14.2"),
    "lightning": ("import hcp.integrations.lightning", "2.5.9"),
    "megatron-core": ("from hcp.integrations.megatron import hcp_layer_spec", "0.15.3"),
    "torchtitan": ("import hcp.integrations.torchtitan", "0.2.2"),
    "transformers": ("import hcp.integrations.transformers", "4.57.1"),
}
"""The entry of each integration, and a version that it refuses."""

EXPECTED = {
    "accelerate": 'expected 1.15, which hcp was tested with: pip install "accelerate>=1.15,<1.16"',
    "lightning": 'expected 2.6, which hcp was tested with: pip install "lightning>=2.6,<2.7"',
    "megatron-core": "expected 0.16.1 or 0.19.2, which hcp was tested with: "
    "pip install megatron-core==0.16.1",
    "torchtitan": "expected 0.3.0, which hcp was tested with: pip install torchtitan==0.3.0",
    "transformers": "expected 5.17 to 5.24, which hcp was tested with: "
    'pip install "transformers>=5.17,<5.25"',
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
    monkeypatch.delitem(sys.modules, "hcp.integrations.transformer_engine.handler", raising=False)
    with pytest.raises(ImportError, match=r"transformer_engine cannot be imported .*: pip install"):
        importlib.import_module("hcp.integrations.transformer_engine.handler")


def test_versions_are_compared_by_their_numbers(monkeypatch):
    found = {"trainer": "2.6.6", "old": "2.5.9", "new": "2.10.0rc1"}
    monkeypatch.setattr(versions, "installed", found.get)
    require("trainer", "2.6", "2.6")
    require("trainer", "2.4", "2.9")
    with pytest.raises(ImportError, match=r'old is 2.5.9, expected 2.6 to 2.9, .*"old>=2.6,<2.10"'):
        require("old", "2.6", "2.9")
    with pytest.raises(ImportError, match=r"new is 2.10.0rc1, expected 2.6 to 2.9, which hcp was"):
        require("new", "2.6", "2.9")


def test_a_local_build_of_a_tested_version_is_taken():
    assert require_one_of("trainer", "0.3.0+cu130", ["0.2.0", "0.3.0"]) == "0.3.0"
    with pytest.raises(ImportError, match=r"trainer is 0.3.1, .* pip install trainer==0.2.0"):
        require_one_of("trainer", "0.3.1", ["0.2.0", "0.3.0"])


SEAM = "textwrap:TextWrapper.fill(text)"


def test_a_version_that_was_not_tested_warns_once_if_what_hcp_calls_is_there(monkeypatch, caplog):
    monkeypatch.setattr(versions, "installed", {"trainer": "2.7.0rc1"}.get)
    for check in ("make it", "compare it"):
        require("trainer", "2.5", "2.6", seams=[SEAM], check=check)
        assert require_one_of("other", "0.4.0", ["0.2.0", "0.3.0"], seams=[SEAM]) == "0.4.0"
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("hcp: trainer is 2.7.0rc1, and hcp was tested with 2.5 to 2.6. ")
    assert first.endswith("What hcp uses of it is there. make it")
    assert "other is 0.4.0, and hcp was tested with 0.2.0 or 0.3.0" in second


def test_a_version_that_was_not_tested_is_refused_by_what_it_lacks(monkeypatch):
    monkeypatch.setattr(versions, "installed", {"trainer": "2.7"}.get)
    lacking = ["textwrap:TextWrapper.fill(columns)", "textwrap:Wrapper", "textwarp:TextWrapper"]
    said = re.escape(f'has no {", ".join(lacking)}, which hcp uses: pip install "trainer>=2.6')
    with pytest.raises(ImportError, match=said):
        require("trainer", "2.6", "2.6", seams=[SEAM, *lacking])
    with pytest.raises(ImportError, match=r"trainer is 0.1.9, expected 0.2.0"):
        require_one_of("trainer", "0.1.9", ["0.2.0"], seams=[SEAM])


@pytest.mark.parametrize(
    "package", ["accelerate", "lightning", "megatron-core", "torchtitan", "transformers"]
)
def test_the_seams_of_a_trainer_are_in_the_version_that_was_tested(package):
    """Else they would refuse every other version."""
    name = {"megatron-core": "megatron.versions"}.get(package, package)
    if importlib.util.find_spec(package.split("-")[0]) is None:
        pytest.skip(f"{package} is not installed")
    module = importlib.import_module(f"hcp.integrations.{name}")
    assert [seam for seam in module.SEAMS if not versions.has_seam(seam)] == []
