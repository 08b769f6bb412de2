"""Show which parts of hcp work on this machine, and why the others do not.

Versions, devices and links are read, never set up: no process group is made, and no CUDA context
without --probe, so that a busy GPU is not touched.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from hcp._versions import installed
from hcp.cli.command_arguments import new_parser

if TYPE_CHECKING:
    from hcp.attention.kernels import Kernel
    from hcp.attention.kernels.present import FamilyStatus

EXTRAS = {
    "matplotlib": "the demo's picture of losses",
    "tqdm": "progress of calibrate and demo",
}
DTYPES = ("float64", "float32", "bfloat16", "float16")
PROBE_ERROR = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-2}


class Diagnosis(NamedTuple):
    part: str
    name: str
    says: str
    usable: bool | None = None
    """None for a fact that is neither good nor bad."""


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("doctor", __doc__)
    parser.add_argument(
        "--probe", action="store_true", help="also run on each GPU, which makes a CUDA context"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as data")
    return parser


def attempt(part: str, name: str, work: Callable[[], str]) -> Diagnosis:
    """Return a finding with the text that `work` returns, or the error that it raises."""
    try:
        return Diagnosis(part, name, work(), True)
    except Exception as error:
        return Diagnosis(part, name, f"{type(error).__name__}: {error}".split("\n")[0], False)


# ---- Versions ------------------------------------------------------------------------------------


NO_TORCH = "not installed, and only plans can be made without it: python -m pip install torch"


def versions() -> Iterator[Diagnosis]:
    import hcp

    part = "versions"
    yield Diagnosis(part, "hcp", hcp.__version__)
    yield from namesake(part)
    yield Diagnosis(part, "Python", f"{platform.python_version()}, {platform.platform()}")
    if not has_torch():
        yield Diagnosis(part, "torch", NO_TORCH, False)
        return
    import torch

    cuda = torch.version.cuda
    yield Diagnosis(part, "torch", f"{torch.__version__}, CUDA {cuda or '-'}")
    for module in ("hcp._core", "hcp.ops"):
        yield attempt(part, module, lambda module=module: loaded(module))  # type: ignore[misc]
    for name, purpose in EXTRAS.items():
        yield extra(part, name, purpose)


def namesake(part: str) -> Iterator[Diagnosis]:
    """Find the other project of the name hcp, whose package has the same import name."""
    version = installed("hcp")
    if version is not None:
        says = (
            f"{version} is installed too: another project, or hcp before 0.2. It and hcp-torch "
            "overwrite each other's files. Uninstall both, then install hcp-torch: "
            "python -m pip uninstall hcp hcp-torch"
        )
        yield Diagnosis(part, "distribution hcp", says, False)


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def loaded(module: str) -> str:
    found = importlib.import_module(module)
    return f"loaded from {found.__file__}"


def extra(part: str, name: str, purpose: str) -> Diagnosis:
    version = installed(name)
    says = f"not installed, needed for {purpose}: python -m pip install {name}"
    return Diagnosis(part, name, version or says, version is not None)


# ---- Devices and links ---------------------------------------------------------------------------


def devices() -> Iterator[Diagnosis]:
    part = "devices"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Diagnosis(part, "CPU", f"{platform.machine()}, {cores} cores for this process", True)
    fields = "index,name,memory.total,driver_version,compute_cap"
    try:
        lines = nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader").splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        yield Diagnosis(part, "GPU", str(error), False)
        return
    for line in lines:
        index, *rest = (word.strip() for word in line.split(","))
        says = "{}, {}, driver {}, compute capability {}".format(*rest)
        yield Diagnosis(part, f"GPU {index}", says, True)
    yield from visible(part, len(lines))


def visible(part: str, gpus: int) -> Iterator[Diagnosis]:
    """Find whether torch can use the GPUs that the driver has."""
    import torch

    if torch.version.cuda is None:
        says = f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
        yield Diagnosis(part, "torch sees", says, False)
        return
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    told = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen!r})"
    count = torch.cuda.device_count()
    yield Diagnosis(part, "torch sees", f"{count} of {gpus} GPUs{told}", count > 0)


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi, which asks the driver and makes no CUDA context.

    Raises OSError if it is missing or fails, subprocess.TimeoutExpired after a minute.
    """
    path = shutil.which("nvidia-smi")
    if path is None:
        raise OSError("nvidia-smi is not on the PATH, no NVIDIA driver is installed here")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().split("\n")[0]
        raise OSError(f"nvidia-smi failed with exit code {done.returncode}: {said}")
    return done.stdout


def links() -> Iterator[Diagnosis]:
    part = "links"
    try:
        matrix = nvidia_smi("topo", "-m")
    except (OSError, subprocess.SubprocessError) as error:
        yield Diagnosis(part, "between GPUs", f"none: {error}", False)
        return
    pairs = link_pairs(matrix)
    if not pairs:
        yield Diagnosis(part, "between GPUs", "one GPU: none")
    for link, members in sorted(pairs.items()):
        shown = ", ".join(f"{a}-{b}" for a, b in members[:6])
        more = "" if len(members) <= 6 else f" and {len(members) - 6} more pairs"
        yield Diagnosis(part, link, f"{LINKS.get(link[:2], 'PCIe')}: GPUs {shown}{more}")


LINKS = {"NV": "NVLink", "SY": "across sockets", "NO": "across NUMA nodes of a socket"}


def link_pairs(matrix: str) -> dict[str, list[tuple[int, int]]]:
    """Return the pairs of GPUs for each kind of link, from the table of ``nvidia-smi topo -m``."""
    rows = [line.split() for line in matrix.splitlines()]
    gpus = [row for row in rows if len(row) > 1 and row[0].startswith("GPU") and "X" in row]
    pairs: dict[str, list[tuple[int, int]]] = {}
    for a, row in enumerate(gpus):
        for b in range(a + 1, len(gpus)):
            pairs.setdefault(row[1 + b], []).append((a, b))
    return pairs


# ---- Kernels, attention, transports --------------------------------------------------------------


NOT_BUILT = "not built in: nvcc was missing when hcp was built"


def operators() -> list[str]:
    """The compiled operators: all of ``torch.ops.hcp`` but attention, which is in Python."""
    import torch

    import hcp.ops  # noqa: F401  (registers them)

    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return sorted(name for of, name in names if of == "hcp" and not name.startswith("attention"))


def kernels() -> Iterator[Diagnosis]:
    lacks = {"CPU": None, "CUDA": lacks_gpu((8, 0))}
    for name in operators():
        for device in lacks:
            yield of_kernel(name, device, lacks[device])


def of_kernel(name: str, device: str, lacks: str | None) -> Diagnosis:
    import torch

    part, shown = "kernels", f"{name}, {device}"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"hcp::{name}", device):
        says = "built in" if lacks is None else f"built in, but {lacks}"
        return Diagnosis(part, shown, says, lacks is None)
    if device == "CPU":
        return Diagnosis(part, shown, "there is none: it is between GPUs")
    return Diagnosis(part, shown, NOT_BUILT, False)


def attention() -> Iterator[Diagnosis]:
    """Find PyTorch's kernels, which the backend torch calls, and then every other backend."""
    import torch

    from hcp.attention.kernels import kernels_of
    from hcp.step.backends import BACKENDS

    part = "attention"
    found = [k for device in ("cpu", "cuda") for k in kernels_of("torch", torch.device(device))]
    for kernel in dict.fromkeys(found):
        yield of_torch(part, kernel)
    for name in BACKENDS:
        if name == "auto":
            yield from of_auto(part)
        elif name != "torch":
            yield of_backend(part, name)


TORCH_KERNELS = {
    "CpuFlash": ("FlashAttention on the CPU", "_scaled_dot_product_flash_attention_for_cpu"),
    "Flash2": ("FlashAttention-2 of torch", "_flash_attention_forward"),
    "Formula": ("the plain formula", None),
}
"""The name of each kernel, and PyTorch's operator."""


def of_torch(part: str, kernel: Kernel) -> Diagnosis:
    import torch

    from hcp.attention.kernels.flash_attn_torch import Flash2

    name, operator = TORCH_KERNELS[type(kernel).__name__]
    says = ", ".join(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes)
    if operator is None:
        says += ": slow, for types that FlashAttention on GPUs lacks"
    elif not hasattr(torch.ops.aten, operator):
        return Diagnosis(part, name, f"torch {torch.__version__} lacks aten::{operator}", False)
    if isinstance(kernel, Flash2):
        lacks = lacks_gpu((8, 0))
        if lacks is None and not torch.backends.cuda.is_flash_attention_available():
            lacks = "torch was built without FlashAttention"
        return Diagnosis(part, name, lacks or says, lacks is None)
    return Diagnosis(part, name, says, True)


def of_backend(part: str, name: str) -> Diagnosis:
    """Find whether a backend can be used. Its library is looked up, not imported."""
    from hcp.attention.kernels import KernelFamily
    from hcp.step.backends import BACKENDS

    backend = BACKENDS[name]
    version = installed(backend.package) if backend.package else None
    if version is None and isinstance(backend, KernelFamily) and backend.module is not None:
        version = backend.version
    if backend.package and version is None:
        return Diagnosis(part, name, f"the package {backend.package} is not installed", False)
    newest = backend.newest if isinstance(backend, KernelFamily) else None
    lacks = lacks_gpu(backend.capability, newest)
    if lacks is not None:
        return Diagnosis(part, name, lacks, False)
    says = f"{backend.package} {version}, not imported" if version else "of torch"
    return Diagnosis(part, name, says, True)


def of_auto(part: str) -> Iterator[Diagnosis]:
    """The families that "auto" chooses between, on each kind of GPU that is here."""
    from hcp.attention.kernels.auto import explained
    from hcp.attention.kernels.present import dotted, survey

    lacks = lacks_gpu()
    if lacks is not None:
        yield Diagnosis(part, "auto", f"what torch does: {lacks}", True)
        return
    try:
        there_are = capabilities()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        yield Diagnosis(
            part, "auto", f"it goes by the GPU, which the driver does not name: {error}"
        )
        return
    for capability in there_are:
        found = survey(capability)
        yield Diagnosis(part, "auto", explained(capability, found), True)
        for line in advice(capability, found):
            yield Diagnosis(part, f"auto on {dotted(capability)}", line)


ADVICE = {
    "flash_attn_4": "install flash-attn-4: it is the fastest for long sequences",
    "cudnn": (
        "install nvidia-cudnn-frontend: it is the fastest for sequences of some hundred tokens"
    ),
    "flash_attn": "install flash-attn: it has torch's kernels with soft-capping",
}
"""The line for each family that "auto" would choose if its package were installed."""


def advice(capability: tuple[int, int], found: Sequence[FamilyStatus]) -> list[str]:
    """The packages to install for a GPU of this compute capability. That of soft-capping is named
    only where no other one caps scores."""
    from hcp.attention.kernels import FAMILIES

    missing = {each.family for each in found if each.lacks is not None}
    lines = {name: ADVICE[name] for name in ADVICE if FAMILIES[name].runs_on(capability)}
    if len(lines) > 1:
        del lines["flash_attn"]
    return [line for name, line in lines.items() if name in missing]


def capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs that the driver has, each once."""
    said = nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader").split()
    numbers = (tuple(map(int, of.split("."))) for of in {*said})
    return sorted((major, minor) for major, minor in numbers)


def lacks_gpu(capability: tuple[int, int] = (0, 0), newest: int | None = None) -> str | None:
    """Return the reason why no GPU here has a compute capability, or a higher one up to the newest.

    None if a GPU has it, and if the driver does not tell.
    """
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA"
    if torch.cuda.device_count() == 0:
        return "torch sees no GPU"
    try:
        there = capabilities()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if any(of >= capability and (newest is None or of[0] <= newest) for of in there):
        return None
    said, wanted = " and ".join(f"{a}.{b}" for a, b in there), ".".join(map(str, capability))
    highest = "higher" if newest is None else f"higher, up to {newest}.x"
    return f"compute capability {said}, expected {wanted} or {highest}"


def transports() -> Iterator[Diagnosis]:
    import torch
    import torch.distributed as dist

    part = "transports"
    yield Diagnosis(part, "loopback", "ranks as threads of one process, for tests", True)
    if not dist.is_available():
        yield Diagnosis(part, "torch.distributed", "torch was built without it", False)
        return
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    lacks = f"torch {torch.__version__} was built without"
    says = "for ranks on CPUs" if gloo else f"{lacks} Gloo"
    yield Diagnosis(part, "torch over Gloo", says, gloo)
    gpus = torch.cuda.device_count()
    says = f"{lacks} NCCL"
    if nccl:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        says = f"NCCL {version}" + ("" if gpus else ", but torch sees no GPU")
    over_nccl = Diagnosis(part, "torch over NCCL", says, nccl and gpus > 0)
    yield over_nccl
    yield from _between_gpus(over_nccl, gpus)


def _between_gpus(over_nccl: Diagnosis, gpus: int) -> Iterator[Diagnosis]:
    """Find hcp's own transports, which build on NCCL's process group."""
    from hcp.exchange.connect import TRANSPORTS, has_kernels

    for name in TRANSPORTS:
        if name in ("auto", "torch"):
            continue
        if not over_nccl.usable:
            yield over_nccl._replace(name=name)
        elif not has_kernels():
            yield Diagnosis(over_nccl.part, name, NOT_BUILT, False)
        elif name == "nccl":
            yield over_nccl._replace(name=name)
        elif gpus < 2:
            yield Diagnosis(over_nccl.part, name, "torch sees one GPU, it wants two", False)
        else:
            says = "if GPUs reach each other's memory: known when process groups are built"
            yield Diagnosis(over_nccl.part, name, says)


# ---- Trying it -----------------------------------------------------------------------------------


def trial(device: str, dtype: str) -> str:
    """Compare attention on 3 ranks of loopback with one rank. Return the difference, in words.

    Raises ArithmeticError if they differ by more than rounding.
    """
    worst = max(_difference(device, dtype, length) for length in (7, 100))
    if not worst <= PROBE_ERROR[dtype]:
        raise ArithmeticError(
            f"3 ranks differ from one by {worst:.1e}, expected <= {PROBE_ERROR[dtype]:.0e}"
        )
    return f"3 ranks in loopback equal one, to {worst:.0e}"


def _difference(device: str, dtype: str, length: int) -> float:
    import torch

    import hcp

    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(length, 3, 2, 16, generator=generator, dtype=torch.float64)

    def attend(ranks: int) -> torch.Tensor:
        plan = hcp.plan([length], ranks=ranks, max_tokens_per_rank=length, min_degree=ranks)

        def run(groups: Any) -> torch.Tensor:
            mine = [{"qkv": qkv.to(device, kind)}] if groups.rank("dp_cp") == 0 else []
            ((cp, local),) = hcp.dispatch(plan, mine, [0], groups)
            q, k, v = local["qkv"].unbind(1)
            return cp.combine(cp.attention(q.contiguous(), k.contiguous(), v.contiguous()))

        return hcp.loopback(ranks, run, device=device)[0]

    return float((attend(3) - attend(1)).abs().max())


def trials(probe: bool) -> Iterator[Diagnosis]:
    """Run plan, dispatch, attention and combine together, on the CPU and, to probe, on GPUs."""
    import torch

    part = "trial"
    for dtype in DTYPES:
        yield attempt(part, f"CPU, {dtype}", lambda dtype=dtype: trial("cpu", dtype))  # type: ignore[misc]
    if not probe:
        yield Diagnosis(part, "GPUs", "not tried: --probe does, and makes a CUDA context")
        return
    if torch.cuda.device_count() == 0:
        yield Diagnosis(part, "GPUs", "not tried: torch sees none", None)
    for i in range(torch.cuda.device_count()):
        for dtype in DTYPES:
            yield attempt(
                part,
                f"GPU {i}, {dtype}",
                lambda i=i, dtype=dtype: trial(f"cuda:{i}", dtype),  # type: ignore[misc]
            )


# ---- The report ----------------------------------------------------------------------------------


def examine(probe: bool) -> Iterator[Diagnosis]:
    yield from versions()
    if not has_torch():
        return
    for part in (devices, links, kernels, attention, transports):
        yield from part()
    yield from trials(probe)


MARKS = {True: "ok", False: "no", None: "  "}
NAMED = 3
"""How many kernels with the same finding are still named."""


def summary(findings: Sequence[Diagnosis]) -> str:
    """Return in one line whether hcp works here, on which devices, and why not on others."""
    import hcp

    wrong = next((finding for finding in findings if is_needed(finding)), None)
    if wrong is not None:
        return f"hcp {hcp.__version__} does not work here. {wrong.name}: {wrong.says}"
    gpus = [f for f in findings if f.part == "devices" and f.name != "CPU"]
    lacking = next((gpu.says for gpu in gpus if not gpu.usable), None)
    if lacking is not None:
        return f"hcp {hcp.__version__} works here on CPUs. It uses no GPU: {lacking}"
    *driven, seen = gpus
    names = " and ".join(dict.fromkeys(gpu.says.split(",")[0] for gpu in driven))
    tried = any(f.part == "trial" and f.name.startswith("GPU ") for f in findings)
    where = "on CPUs and on each GPU" if tried else "on CPUs; --probe also tries each GPU"
    return f"hcp {hcp.__version__} works here {where}. torch sees {seen.says} ({names})"


def is_needed(finding: Diagnosis) -> bool:
    """Whether hcp does not work because of this finding."""
    return finding.usable is False and (finding.part == "trial" or finding.says == NO_TORCH)


def folded(kernels: Sequence[Diagnosis]) -> Iterator[Diagnosis]:
    """Tell of the kernels of a device in one line, and in another of those with another finding."""
    alike: dict[tuple[str, str, bool | None], list[str]] = {}
    for finding in kernels:
        name, device = finding.name.split(", ")
        alike.setdefault((device, finding.says, finding.usable), []).append(name)
    for (device, says, usable), names in sorted(alike.items(), key=lambda item: item[0][0]):
        told = ", ".join(names) if len(names) <= NAMED else f"{len(names)} kernels"
        yield Diagnosis("kernels", device, f"{told}: {says}", usable)


def main(argv: Sequence[str]) -> int:
    """Print the findings. Return 0 if hcp works on the CPU and, with --probe, on every GPU."""
    args = build_parser().parse_args(argv)
    findings = list(examine(args.probe))
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        print(summary(findings))
        for part, members in groupby(findings, key=lambda finding: finding.part):
            print(part)
            for finding in folded([*members]) if part == "kernels" else members:
                print(f"  {MARKS[finding.usable]}  {finding.name:26}  {finding.says}")
    return int(any(map(is_needed, findings)))
