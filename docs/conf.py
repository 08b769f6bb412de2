"""The documentation as a site: `make docs`.

Sphinx reads the tree itself, so that links between pages, results and sources stay as they are on
disk. What GitHub would show as bare directives is added here: the lists of pages, the README's
parts on the front page, a page for each public name, and the links of names in backticks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.nodes import make_refnode

import hcp

HERE = Path(__file__).parent

project = "hcp"
author = "The hcp developers"
release = hcp.__version__
root_doc = "docs/index"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
include_patterns = [
    "docs/**.md",
    "docs/reference/names/*.rst",
    "benchmarks/**.md",
    "examples/README.md",
    "tests/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [".venv*", ".git", "build", "dist", "runs"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# "text" is for output, and for drawings in characters.
highlight_language = "text"

# Docstrings write names in single backticks, too.
default_role = "code"
python_maximum_signature_line_length = 88
# What a constructor takes stands below what its class is.
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
# Its own pages are written below: autosummary would take the names from files alone.
autosummary_generate = False
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"hcp {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["pages"]
html_show_sourcelink = False
html_copy_source = False

CONTENTS = {
    "Start": [
        "quickstart",
        "guides/install",
        "guides/demo",
        "../examples/README",
        "guides/troubleshooting",
    ],
    "Trainers": [
        "guides/megatron",
        "guides/megatron_lm",
        "guides/megatron_bridge",
        "guides/transformers",
        "guides/trl",
        "guides/accelerate",
        "guides/deepspeed",
        "guides/lightning",
        "guides/torchtitan",
        "guides/axolotl",
        "guides/llama_factory",
        "guides/ms_swift",
        "guides/rl",
        "guides/draft-heads",
    ],
    "Guides": [
        "guides/long-sequences",
        "guides/evaluation",
        "guides/choosing-comm-type",
        "guides/planning",
        "guides/calibration",
        "guides/observing",
        "guides/gpus",
        "guides/comparison",
        "guides/pitfalls",
        "guides/known-faults",
        "guides/faq",
    ],
    "Concepts": [
        "concepts/groups",
        "concepts/layout",
        "concepts/plan",
        "concepts/masks",
        "concepts/dispatch",
        "concepts/fields",
        "concepts/trees",
        "concepts/attention",
        "concepts/comm-types",
        "concepts/transports",
        "concepts/backends",
        "concepts/rotary",
        "concepts/latent-attention",
        "concepts/sparse-attention",
        "concepts/states",
        "concepts/loss",
        "concepts/agreement",
        "concepts/rebind",
    ],
    "Reference": ["reference/*", "../CHANGELOG", "../SECURITY"],
    "Measured": ["../benchmarks/README", "../benchmarks/results/README"],
    "For maintainers": ["../CONTRIBUTING", "internals/*", "../tests/README"],
}
"""The pages beside every page, by their captions; concepts in the order of a step. They are not on
the first page's text, which is also read where directives mean nothing."""

OF_README = {
    "<!-- README: from its title to its install -->": ("# hcp", "## Install"),
    "<!-- README: limits -->": ("## What it does not do yet", "## Where to read on"),
}
"""The comments of the front page, and the lines of README.md between which its part stands."""

OWNERS = {
    "cp": "ContextParallelHandler",
    "cp.comm": "CommChoices",
    "cp.group": "HandlerGroup",
    "cp.scan": "Scan",
    "cp.sequences": "SequenceValues",
    "cp.sparse": "SparseAttention",
    "cp.whole": "WholeSequences",
    "plan": "Plan",
    "step": "Step",
    "groups": "ProcessGroups",
    "train_pgs": "ProcessGroups",
    "eval_pgs": "ProcessGroups",
    "config": "Config",
    "metrics": "Metrics",
}
"""What pages call an object of a class."""


def setup(app: Any) -> None:
    app.connect("builder-inited", write_names)
    app.connect("source-read", add_parts)
    app.connect("doctree-resolved", link_names)


# ---- What is added to pages ----------------------------------------------------------------------


def add_parts(app: Any, page: str, source: list[str]) -> None:
    if page == root_doc:
        for comment, ends in OF_README.items():
            source[0] = source[0].replace(comment, of_readme(*ends))
        source[0] += "".join(map(contents, CONTENTS.items()))
    if page == "benchmarks/results/README":
        source[0] += directive("toctree", ":hidden:", ":glob:", "", "*", "superseded/*")
    if page == "docs/reference/api":
        source[0] += "\n## Parameters, units and errors\n\nA page for each name.\n"
        named = [f"   {name}" for name in documented()]
        source[0] += in_rst(".. autosummary::", "   :toctree: names", "", *named)


def of_readme(start: str, end: str) -> str:
    """The part of README.md after its first line and before the other one, for a page in docs."""
    lines = (HERE.parent / "README.md").read_text(encoding="utf-8").splitlines()
    lost = [line for line in (start, end) if line not in lines]
    if lost:
        raise ValueError(f"README.md has no line {lost}, expected by OF_README of docs/conf.py")
    first = lines.index(start) + (not start.startswith("##"))
    text = "\n".join(lines[first : lines.index(end)])
    return re.sub(r"\]\((?!#|\w+://)", "](../", text)


def contents(part: tuple[str, list[str]]) -> str:
    caption, pages = part
    return directive("toctree", ":hidden:", ":glob:", f":caption: {caption}", "", *pages)


def in_rst(*lines: str) -> str:
    return directive("eval-rst", *lines)


def directive(name: str, *lines: str) -> str:
    return "\n".join(("", f"```{{{name}}}", *lines, "```", ""))


# ---- Pages of names ------------------------------------------------------------------------------


def documented() -> list[str]:
    """The public names that have a docstring, with their modules: all but constants."""
    page = (HERE / "reference/api.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `(hcp\.[\w.]+)", page, re.MULTILINE)
    return [name for name in names if callable(value_of(name))]


def value_of(name: str) -> Any:
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)


def write_names(app: Any) -> None:
    """Write the page of each public name into docs/reference/names, which git ignores."""
    folder = HERE / "reference" / "names"
    folder.mkdir(exist_ok=True)
    for name in documented():
        path, text = folder / f"{name}.rst", page_of(name)
        # Sphinx reads again what is newer.
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def page_of(name: str) -> str:
    value = value_of(name)
    title = [name, "=" * len(name), ""]
    if not inspect.isclass(value):
        return "\n".join((*title, f".. autofunction:: {name}", ""))
    methods = [f"   ~{name}.{each}" for each in methods_of(value)]
    table = [".. autosummary::", "   :nosignatures:", "", *methods, ""] if len(methods) > 3 else []
    foreign = "   :inherited-members: dict, tuple, Exception, Module"
    shown = [f".. autoclass:: {name}", "   :members:", foreign]
    return "\n".join((*title, *table, *shown, ""))


def methods_of(cls: type) -> list[str]:
    """The public methods of a class and of those of hcp that it derives from, as they stand."""
    owners = [owner for owner in cls.__mro__ if owner.__module__.startswith("hcp")]
    return list(
        dict.fromkeys(
            name
            for owner in owners
            for name, value in vars(owner).items()
            if not name.startswith("_") and inspect.isroutine(getattr(cls, name, None))
            if inspect.getdoc(value)
        )
    )


# ---- Links of names in backticks -----------------------------------------------------------------


def link_names(app: Any, doctree: nodes.document, page: str) -> None:
    """Link each public name in backticks, such as `cp.attention(q, k, v)`, to its docstring."""
    objects = app.env.get_domain("py").objects
    for literal in list(doctree.findall(nodes.literal)):
        found = objects.get(full_name(literal.astext()))
        if found is None or linked_already(literal):
            continue
        link = make_refnode(
            app.builder, page, found.docname, found.node_id, literal.deepcopy(), literal.astext()
        )
        literal.replace_self(link)


def full_name(text: str) -> str:
    """The name of a docstring's object, for the words that pages use; "" for other words."""
    named = re.match(r"([A-Za-z_]\w*(?:\.\w+)*)(?:\(|$)", text)
    first, dot, rest = named[1].partition(".") if named else ("", "", "")
    part, of_part, inside = rest.partition(".")
    if of_part and f"{first}.{part}" in OWNERS:
        first, rest = f"{first}.{part}", inside
    if first == "hcp":
        return f"hcp.{rest}"
    owner = OWNERS.get(first, first) if dot else first
    home = homes().get(owner, "")
    found = owner[:1].isupper() or (home and home != f"hcp.{owner}")
    return f"{home}{dot}{rest}" if home and found else ""


@functools.cache
def homes() -> dict[str, str]:
    """Public names with their modules, by themselves."""
    return {name.rpartition(".")[2]: name for name in documented()}


def linked_already(node: nodes.Node) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, nodes.reference | nodes.title):
            return True
    return False
