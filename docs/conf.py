"""The documentation as a site: `make docs`.

Sphinx reads the tree itself, so that links between pages, results and sources stay as they are on
disk. Public names come from hcp's docstrings.
"""

from __future__ import annotations

import inspect
from typing import Any

import hcp

project = "hcp"
author = "The hcp developers"
release = hcp.__version__
root_doc = "docs/index"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
include_patterns = [
    "docs/**.md",
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

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"

html_theme = "furo"
html_title = f"hcp {release}"
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
        "guides/rl",
    ],
    "Guides": [
        "guides/evaluation",
        "guides/choosing-comm-type",
        "guides/planning",
        "guides/calibration",
        "guides/observing",
        "guides/gpus",
        "guides/comparison",
        "guides/pitfalls",
        "guides/faq",
    ],
    "Concepts": ["concepts/*"],
    "Reference": ["reference/*", "../CHANGELOG", "../SECURITY"],
    "Measured": ["../benchmarks/README", "../benchmarks/results/README"],
    "For maintainers": ["../CONTRIBUTING", "internals/*", "../tests/README"],
}
"""The pages beside every page, by their captions. They are not on the first page's text, which is
also read where directives mean nothing."""


def setup(app: Any) -> None:
    app.connect("source-read", add_directives)


def add_directives(app: Any, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += "".join(map(contents, CONTENTS.items()))
    if page == "benchmarks/results/README":
        source[0] += directive("toctree", ":hidden:", ":glob:", "", "*", "superseded/*")
    if page == "docs/reference/api":
        source[0] += "\n## Docstrings\n" + "".join(map(docstring, hcp.__all__))


def contents(part: tuple[str, list[str]]) -> str:
    caption, pages = part
    return directive("toctree", ":hidden:", ":glob:", f":caption: {caption}", "", *pages)


def docstring(name: str) -> str:
    value = getattr(hcp, name)
    if inspect.isclass(value):
        return f"\n### {name}\n" + in_rst(f".. autoclass:: hcp.{name}", "   :members:")
    if inspect.isfunction(value):
        return f"\n### {name}\n" + in_rst(f".. autofunction:: hcp.{name}")
    return ""


def in_rst(*lines: str) -> str:
    return directive("eval-rst", *lines)


def directive(name: str, *lines: str) -> str:
    return "\n".join(("", f"```{{{name}}}", *lines, "```", ""))
