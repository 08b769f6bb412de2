"""Every code block of README.md, docs/ and examples/README.md is run, or a comment says why not.

The python blocks of a page run in order in one namespace, in a process of their own. Lines of bash
blocks that install, or that run all tests, are checked against the Makefile and pyproject.toml;
`python -m hcp` lines are run, with small limits where a command would take long; other programs of
the project must exist. A block is left out by a comment on the line above it:

    <!-- no-run: needs two nodes -->

and a page whose packages `make test` does not install says so on a line of its own, and is left out
where they are absent:

    <!-- needs: lightning -->

A reader sees where every name of a python block comes from: the block or an earlier one of the page
binds it, hidden ones aside, or a sentence above says that it is the reader's own:

    `model` and `loader` are yours.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path

import pytest
from support import readme_example
from support.doc_blocks import run_blocks, run_on_rank
from support.public_names import parts_of_handler, public_names, value_of
from support.ranks import Finished, run_alone, run_module, run_ranks

import hcp
from hcp.step.stats import StepStats

ROOT = Path(__file__).resolve().parents[2]
FOUND = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "examples" / "README.md",
]
PAGES = [path for path in FOUND if path.exists()]

LINKING = [
    *ROOT.glob("*.md"),
    *PAGES[1:],
    *sorted(ROOT.glob("benchmarks/**/*.md")),
    ROOT / "tests" / "README.md",
]

# Appended to `python -m hcp COMMAND ...`: the last value of a flag counts.
TWO = ["--ranks", "2"]
FEW = [*TWO, "--train-iters", "2", "--eval-documents", "4", "--max-length", "512"]
SMALL = {
    "demo": [
        *FEW,
        *("--num-layers", "1", "--hidden-size", "32", "--ffn-hidden-size", "64"),
    ],
    "calibrate": [
        *TWO,
        *("--num-layers", "1", "--hidden-size", "64", "--ffn-hidden-size", "128"),
        *("--max-tokens-per-rank", "1024", "--repeats", "1", "--accept-errors"),
    ],
    "hcp.integrations.megatron": [*FEW, "--hidden-size", "32", "--num-layers", "1"],
    "hcp.integrations.transformers": [*FEW, "--models", "llama"],
}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """The number of the first line of code."""
    language: str
    code: str
    reason: str | None
    """Why it is not run."""

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path, text: str) -> list[Block]:
    """Fenced blocks of a page, in order. Those inside lists may be indented."""
    pattern = re.compile(
        r"(?:^[ ]*<!--[ ]*no-run:(?P<reason>.*?)-->[ ]*\n)?"
        r"^(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$",
        re.MULTILINE | re.DOTALL,
    )
    found = []
    for match in pattern.finditer(text):
        indent = match["indent"]
        code = re.sub(f"^{indent}", "", match["code"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start("code")) + 1
        reason = match["reason"]
        found.append(
            Block(page, line, match["language"], code, None if reason is None else reason.strip())
        )
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text())]
PYTHON_PAGES = sorted({block.page for block in BLOCKS if block.language == "python"})
BASH_BLOCKS = [block for block in BLOCKS if block.language == "bash" and block.reason is None]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    skip_without_needs(page)
    succeed(run_alone(run_blocks, str(page), python_of(page), folder=tmp_path))


def python_of(page: Path) -> list[tuple[int, str]]:
    blocks = [
        (block.line, block.code)
        for block in BLOCKS
        if block.page == page and block.language == "python" and block.reason is None
    ]
    if page.name == "README.md":
        return [(1, readme_example.BEFORE), *blocks, (1, readme_example.AFTER)]
    return blocks


RANK_PAGES = [page for page in PYTHON_PAGES if "# under torchrun:" in page.read_text()]


@pytest.mark.parametrize("page", RANK_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_that_says_so_runs_on_several_ranks(page: Path) -> None:
    skip_without_needs(page)
    run_ranks(2, run_on_rank, str(page), python_of(page))


def test_the_training_step_of_the_quickstart_runs_as_a_script_of_one_rank(tmp_path: Path) -> None:
    page = ROOT / "docs" / "quickstart.md"
    _, step, ending = (
        block.code for block in BLOCKS if block.page == page and block.language == "python"
    )
    *lines, last = step.splitlines()
    assert last == "hcp.loopback(2, train)"
    script = tmp_path / "script.py"
    script.write_text("\n".join([*lines, ending]))
    succeed(run_alone(runpy.run_path, str(script), None, "__main__", folder=tmp_path))


def skip_without_needs(page: Path) -> None:
    for name in re.findall(r"^<!-- needs: (\w+) -->$", page.read_text(), re.MULTILINE):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{page.name} needs {name}: make test, make test-trainers")


def succeed(done: Finished) -> None:
    assert done.code == 0, f"exit status {done.code}\n{done.out}\n{done.err}"


# ---- Names of python blocks ----------------------------------------------------------------------

SPAN = r"`(\w+)`"
YOURS = re.compile(rf"((?:{SPAN}(?:,?\s+and\s+|,\s+)?)+)\s+(?:is|are)\s+yours\b")


def bound_by(node: ast.AST) -> set[str]:
    """The names that a node of a syntax tree binds, in whatever scope."""
    match node:
        case ast.Name(name, ast.Store()) | ast.arg(name) | ast.ExceptHandler(name=str(name)):
            return {name}
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return {name}
        case ast.alias(name, asname):
            return {asname or name.partition(".")[0]}
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return {name}
    return set()


def used_by(node: ast.AST) -> set[str]:
    return {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()


def declared_above(block: Block, text: str) -> set[str]:
    """The names that sentences above a block call the reader's own."""
    above = "\n".join(text.splitlines()[: block.line - 1])
    return {name for found in YOURS.finditer(above) for name in re.findall(SPAN, found[1])}


def visible(text: str) -> str:
    """A page without its comments: with their empty lines, so that others keep their numbers."""
    return re.sub(r"<!--.*?-->", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)


def names_from_nowhere(text: str, page: Path = Path("p.md")) -> list[str]:
    """Places and names of a page's python blocks that a reader cannot trace."""
    text = visible(text)
    known, lost = {*dir(builtins), "__file__"}, []
    for block in (block for block in blocks_of(page, text) if block.language == "python"):
        nodes = list(ast.walk(ast.parse(block.code)))
        known |= set().union(*map(bound_by, nodes), declared_above(block, text))
        used = set().union(*map(used_by, nodes))
        lost += [f"{block.place} {name}" for name in sorted(used - known)]
    return lost


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_reader_sees_where_each_name_of_a_python_block_comes_from(page: Path) -> None:
    lost = names_from_nowhere(page.read_text(), page)
    assert not lost, (
        f"{lost}: import or assign them in the block or an earlier one of the page, or write "
        "'`name` is yours' above the block"
    )


# ---- Bash ----------------------------------------------------------------------------------------


def commands_of(code: str) -> list[list[str]]:
    """Words of each command: continued lines joined, comments gone, cut at && and ;."""
    commands: list[list[str]] = []
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|<>()")
        lexer.whitespace_split = True
        commands.append([])
        for word in lexer:
            if word in ("&&", ";"):
                commands.append([])
            else:
                commands[-1].append(word)
    return [command for command in commands if command]


def split_settings(command: list[str]) -> list[str]:
    """A command without the NAME=value words in front of it."""
    while command and re.match(r"[A-Z_]+=", command[0]):
        command = command[1:]
    return command


def targets() -> set[str]:
    """Targets that the Makefile offers."""
    phony = re.findall(r"^\.PHONY:(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {name for names in phony for name in names.split()}


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def check_make(arguments: list[str]) -> None:
    wanted = {word for word in arguments if "=" not in word and not word.startswith("-")}
    assert wanted <= targets(), f"make has no target {sorted(wanted - targets())}"


def check_install(arguments: list[str]) -> None:
    """pip install ...: extras of hcp that are named exist."""
    for word in arguments:
        named = re.fullmatch(r"(?:\.|hcp-torch)\[(.*)\]", word)
        if named:
            wanted = {name.strip() for name in named[1].split(",")}
            assert wanted <= extras(), f"pyproject.toml has no extra {sorted(wanted - extras())}"


def check_program(arguments: list[str]) -> None:
    """python path/to/file.py ...: the file is in the tree, and takes the flags given."""
    program = ROOT / arguments[0]
    assert program.exists(), f"{arguments[0]} does not exist"
    flags = {word.partition("=")[0] for word in arguments[1:] if word.startswith("--")}
    if flags:
        done = subprocess.run(
            [sys.executable, str(program), "--help"], capture_output=True, text=True, check=True
        )
        unknown = {flag for flag in flags if flag not in done.stdout}
        assert not unknown, f"{arguments[0]} --help does not know {sorted(unknown)}"


def run_small(module: str, given: list[str], small: list[str], folder: Path) -> None:
    """A program of several ranks runs as on those that a launcher started."""
    succeed(run_module(module, *given, *small, folder=folder, ranks=2 if small else None))


def check_python(arguments: list[str], folder: Path) -> None:
    match arguments:
        case ["-m", "hcp", *rest]:
            run_small("hcp", rest, SMALL.get(rest[0] if rest else "", []), folder)
        case ["-m", program, *rest] if program.startswith("hcp.integrations."):
            run_small(program, rest, SMALL[program], folder)
        case ["-m", "pip", "install", *rest]:
            check_install(rest)
        case ["-m", "venv", *_]:
            pass
        case ["-m", "pytest", *rest]:
            paths = [word.partition("::")[0] for word in rest if word.startswith("tests/")]
            assert [path for path in paths if not (ROOT / path).exists()] == []
        case ["-c", code]:
            succeed(run_alone(exec, code, folder=folder))
        case [program, *_] if program.endswith(".py"):
            check_program(arguments)
        case _:
            raise AssertionError(f"what python {shlex.join(arguments)} does is not known here")


def check_command(command: list[str], folder: Path) -> None:
    match split_settings(command):
        case ["make", *rest]:
            check_make(rest)
        case ["pip" | "pip3", "install", *rest]:
            check_install(rest)
        case ["pip", "uninstall", *names]:
            assert set(names) <= {"hcp", "hcp-torch"}, names
        case ["python" | "python3" | ".venv/bin/python", *rest]:
            check_python(rest, folder)
        case ["hcp", *rest]:
            (folder / "mine.jsonl").write_text('{"length": 9000}\n{"length": 70}\n')
            check_python(["-m", "hcp", *rest], folder)
        case ["source" | ".", path] if path.endswith("/bin/activate"):
            pass
        case ["git", "clone", *_] | ["cd", _]:
            pass
        case _:
            raise AssertionError(
                f"{shlex.join(command)!r} is neither run nor checked here: teach "
                "tests/project/test_docs.py, or put <!-- no-run: reason --> above the block"
            )


@pytest.mark.parametrize("block", BASH_BLOCKS, ids=lambda block: block.place)
def test_bash_block_names_what_exists_and_runs_what_is_hcp(block: Block, tmp_path: Path) -> None:
    skip_without_needs(block.page)
    for command in commands_of(block.code):
        check_command(command, tmp_path)


# ---- Links ---------------------------------------------------------------------------------------


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_title_of_the_tree(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors_of(target), f"{link}: no such title"


def test_every_page_of_docs_is_reached_from_the_map() -> None:
    reached, todo = set(), [ROOT / "docs" / "index.md"]
    while todo:
        page = todo.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#]+\.md)", without_code(page))
        todo += {(page.parent / link).resolve() for link in links if "://" not in link} - reached
    assert {page for page in PAGES if page.parent != ROOT} - reached == set()


# ---- Names ---------------------------------------------------------------------------------------

FOLDERS = ("hcp", "csrc", "tests", "benchmarks", "examples")
SOURCES = "\n".join(
    path.read_text()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".c", ".h", ".sh")
)

METRICS = {f"hcp/{name}" for name in (*StepStats._fields, "plan_hidden")}


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute, or one that a class declares."""
    parts = name.split(".")
    found: object = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        if part in getattr(found, "__annotations__", {}):
            return True
        if not hasattr(found, part):
            return importlib.util.find_spec(".".join(parts[:end])) is not None
        found = getattr(found, part)
    return True


@pytest.mark.filterwarnings(
    "ignore:hcp[.].* is now hcp"
)  # entries of the changelog name old places
@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_of_hcp_exists(page: Path) -> None:
    text = page.read_text()
    names = set(re.findall(r"\bhcp(?:\.[A-Za-z_]\w*)+", text)) - {"hcp.h"}
    assert sorted(name for name in names if not exists(name)) == []
    paths = set(re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)[` ]", text)) - METRICS
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z-]*[a-z])", text))
    unknown = [flag for flag in flags if not {flag, flag.replace("-", "_")} & WORDS]
    assert sorted(flag for flag in unknown if f"--{flag}" not in SOURCES) == []


WORDS = set(re.findall(r"[a-z_]+", SOURCES))


# ---- Docstrings ----------------------------------------------------------------------------------

PARTS = {value_of(cls): f"cp.{name}" for name, cls in parts_of_handler().items()}
MADE = {hcp.Plan, hcp.ProcessGroups, hcp.LocalBatch, hcp.Step, hcp.HcpError, *PARTS}
"""Classes whose values hcp makes: nobody else calls their constructors."""


def calls_of(cls: type) -> Iterator[tuple[str, Callable[..., object]]]:
    """The constructor of a class, and its public methods that take something."""
    for name, value in vars(cls).items():
        call = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        own = name == "__init__" and cls not in MADE and not is_dataclass(cls)
        if inspect.isfunction(call) and (own or not name.startswith("_")) and taken_by(call):
            yield name, call


def taken_by(call: Callable[..., object]) -> list[str]:
    """Its parameters, but the first one of a method."""
    return [*inspect.signature(call).parameters]["." in call.__qualname__ :]


PUBLIC = {name.rpartition(".")[2]: value_of(name) for name in public_names()}
OBJECTS = PARTS | {hcp.ContextParallelHandler: "cp"}
CALLED = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
CALLED |= {
    f"{OBJECTS.get(cls, owner)}.{name}": call
    for owner, cls in PUBLIC.items()
    if inspect.isclass(cls)
    for name, call in calls_of(cls)
}
BRIEF = {"cp.scan.halo_rows", "cp.whole.head_slice", "cp.get_rotary_seq_len"}
"""Methods whose one sentence names what they take."""
BRIEF |= {"cp.get_emb_on_this_cp_rank", "CoreAttention.forward"}
BRIEF |= {f"Rotary.{name}" for name in ("check", "fits", "for_kernels", "rotate", "rotate_back")}


@pytest.mark.parametrize("name", sorted(CALLED.keys() - BRIEF))
def test_a_docstring_names_each_parameter_and_what_comes_back(name: str) -> None:
    text = inspect.getdoc(CALLED[name]) or ""
    part = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
    named = re.findall(r"^    \*{0,2}(\w+): ", part, re.MULTILINE)
    assert named == taken_by(CALLED[name])
    nothing = inspect.signature(CALLED[name]).return_annotation == "None"
    assert nothing or "\nReturns:\n    " in text


def test_constructors_and_methods_of_public_classes_are_among_those_with_docstrings() -> None:
    wanted = {"EvalPlan.__init__", "Mask.__init__", "GraphHandler.__init__", "PlanAhead.__init__"}
    wanted |= {
        "cp.__init__",
        "cp.attention",
        "cp.scan.pass_maps",
        "cp.sparse.top_k",
        "Mask.tree",
        "ProcessGroups.from_existing",
        "plan",
    }
    assert wanted <= CALLED.keys()
    assert not {"Plan.__init__", "CostModel.__init__"} & CALLED.keys()


# ---- Comparison ----------------------------------------------------------------------------------


def test_the_comparison_says_what_each_does_better_and_what_was_measured() -> None:
    page = (ROOT / "docs/guides/comparison.md").read_text()
    table = page.partition("## What each does better")[2].partition("##")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    named = {name: (better, measured) for name, better, measured in rows[2:]}
    assert len(named) == 7
    for name, (better, measured) in named.items():
        assert better, name
        assert "benchmarks/results/" in measured or "not measured" in measured, name
        assert f"**{name.removesuffix(' (DeepSpeed)').rstrip('`')}" in page.replace(
            "Megatron-B", "B"
        )


# ---- The rules themselves ------------------------------------------------------------------------


def test_a_block_that_is_not_run_says_why() -> None:
    assert [block.place for block in BLOCKS if block.reason == ""] == []


def test_no_block_hides_behind_another_name() -> None:
    others = {"py", "python3", "sh", "shell", "console", "zsh", "pycon"}
    assert [block.place for block in BLOCKS if block.language in others] == []


def test_blocks_are_found_with_their_line_and_reason() -> None:
    python = "# t\n\n```python\nx = 1\n```\n"
    text = f"{python}\n- item\n\n  <!-- no-run: two nodes -->\n  ```bash\n  a\n  ```\n"
    first, second = blocks_of(Path("p.md"), text)
    assert (first.language, first.line, first.code, first.reason) == ("python", 4, "x = 1\n", None)
    assert (second.language, second.line, second.code) == ("bash", 11, "a\n")
    assert second.reason == "two nodes"


def test_names_from_nowhere_are_found_and_those_of_the_reader_are_not() -> None:
    text = (
        "```python\nimport torch.nn as nn\nf = lambda x: [y + nn.a for y in x]\n```\n"
        "`model`, `loader`\nand `step` are yours.\n"
        "```python\nwith f(model) as g, h(loader):\n    print(g, step, later)\n```\n"
        "`later` is yours.\n"
    )
    assert names_from_nowhere(text) == ["p.md:8 h", "p.md:8 later"]
    hidden = "<!-- What the line below takes as given:\n```python\nx = 1\n```\n-->\n"
    assert names_from_nowhere(f"{hidden}```python\nx + 1\n```\n") == ["p.md:7 x"]


def test_commands_are_cut_and_joined() -> None:
    code = "# all\nA=1 make test && cd x  # here\npython -m hcp \\\n  demo --ranks 2\n"
    assert commands_of(code) == [
        ["A=1", "make", "test"],
        ["cd", "x"],
        ["python", "-m", "hcp", "demo", "--ranks", "2"],
    ]


@pytest.mark.parametrize(
    "line",
    ["make nonsense", "pip install '.[nonsense]'", "python nowhere/bench.py", "frobnicate --now"],
)
def test_a_line_that_names_what_does_not_exist_fails(line: str, tmp_path: Path) -> None:
    (command,) = commands_of(line)
    with pytest.raises(AssertionError):
        check_command(command, tmp_path)


def test_every_page_has_a_place_in_the_site() -> None:
    tree = ast.parse((ROOT / "docs/conf.py").read_text())
    (found,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTENTS"
    )
    patterns = [each for part in ast.literal_eval(found).values() for each in part]
    pages = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
    }
    lost = {page for page in pages - {"index"} if not any(map(Path(page).match, patterns))}
    assert not lost, f"docs/conf.py has no place for {sorted(lost)} in CONTENTS"
    assert all((ROOT / "docs" / f"{each}.md").exists() for each in patterns if "*" not in each)
