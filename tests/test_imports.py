"""Imports point one way: ir <- frontends, passes, backends, runtime; all <- graftwork.

The folder of a method (passes/drafting/NAME, passes/depth/NAME) stands above those: what a plan and
the runtime look for, its record and class, sees ir, runtime and other methods' records and classes;
``graph.py``, its pass, sees what passes see; ``objective.py`` sees training, too, and ``loop.py``
backends. No other file of these rooms imports an objective or a loop.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest
from selection import in_turn

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "ir": {"ir"},
    "frontends": {"frontends", "ir"},
    "passes": {"passes", "ir"},
    "backends": {"backends", "ir"},
    "runtime": {"runtime", "ir"},
    "recipes": {"recipes"},
}
METHOD = re.compile(r"passes/(drafting|depth)/\w+/(\w+)\.py")
FILES = [path for part in ALLOWED for path in sorted((ROOT / part).rglob("*.py"))]
FRONT = (
    *(
        "__main__",
        "cli",
        "serving",
        "mapping",
        "ready",
        "training",
        "measuring",
        "optimizing",
        "choosing",
    ),
    *("model", "chat", "exporting", "data", "tracing", "draft_option", "recipe_schema", "recipe"),
    *("artifact", "hub", "report", "drawing", "_version"),
)
"""Files and folders of graftwork/, each above all that it imports."""


def module_of(path: Path) -> list[str]:
    """``ir/ops/norm.py`` is graftwork.ir.ops.norm; the folder graftwork is graftwork itself."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    package = parts if parts[0] == "graftwork" else ["graftwork", *parts]
    return package


parsed = functools.cache(ast.parse)


def imported(source: str, module: list[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a file imports, at any depth."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def allowed(path: Path) -> set[str]:
    """Rooms that a file may import from."""
    method = METHOD.fullmatch(path.relative_to(ROOT).as_posix())
    kind = method[2] if method else ""
    if kind == "objective":
        return {"passes", "ir", "training"}
    if kind == "loop":
        return {"backends", "ir", "a method"}
    light = method and kind != "graph"
    return {"runtime", "ir", "a method"} if light else ALLOWED[path.relative_to(ROOT).parts[0]]


def room(name: str) -> str:
    """The room of an imported name; "a method" for a method's record and class."""
    _, room, *inner = [*name.split("."), ""]
    if room != "passes":
        return room
    if set(inner) & {"objective", "loop"}:
        return "an objective"
    folder = len(inner) > 2 and (ROOT / "passes" / inner[0] / inner[1]).is_dir()
    return "a method" if folder and inner[2] != "graph" else "passes"


def explained(source: str) -> set[ast.AST]:
    """What stands in ``if TYPE_CHECKING:  # why``: imports for annotations, with their reason."""
    lines, tree = source.splitlines(), parsed(source)
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "#" in lines[n.lineno - 1]]
    return {node for b in blocks if ast.unparse(b.test) == "TYPE_CHECKING" for node in ast.walk(b)}


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Modules that import each other in a loop. sources: by name."""
    graph = nx.DiGraph()
    for module, source in sources.items():
        packaged = module.split(".") + ["__init__"] * any(
            m.startswith(f"{module}.") for m in sources
        )
        lines = {node.lineno for node in explained(source) if isinstance(node, ast.ImportFrom)}
        for line, name in imported(source, packaged):
            found = name if name in sources else name.rpartition(".")[0]
            if line not in lines and found != module:
                graph.add_edge(module, found)
    return [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]


def violations(source: str, module: list[str], rooms: set[str]) -> list[str]:
    """Imports of graftwork's parts that are not allowed."""
    more = {"a method"} if "passes" in rooms else set()
    more |= {"an objective"} if "training" in rooms else set()
    return [
        f"line {line}: {name}"
        for line, name in imported(source, module)
        if name.split(".")[0] == "graftwork" and room(name) not in rooms | more
    ]


@in_turn(lambda: FILES)
def test_direction(path: Path) -> None:
    assert violations(path.read_text(), module_of(path), allowed(path)) == []


def test_the_check_sees_violations() -> None:
    source = "from ..passes import base\nfrom .. import backends\nimport graftwork.runtime\n"
    found = violations(source, ["graftwork", "ir", "x"], {"ir"})
    assert [f.split(": ")[1] for f in found] == [
        "graftwork.passes.base",
        "graftwork.backends",
        "graftwork.runtime",
    ]


def test_a_method_is_light_where_the_runtime_looks_for_it() -> None:
    source = "from .graph import DraftPpd\nfrom ..grafts import Graft\nfrom ..s3d import M\n"
    folder, package = ROOT / "passes" / "drafting" / "ppd", ["graftwork", "passes", "drafting"]
    found = violations(source, [*package, "ppd", "__init__"], allowed(folder / "__init__.py"))
    assert [f.split(": ")[1].split(".")[-1] for f in found] == ["DraftPpd", "Graft"]
    assert violations(source, [*package, "ppd", "graph"], allowed(folder / "graph.py")) == []
    other = violations("from .ppd.objective import a\n", [*package, "x"], ALLOWED["passes"])
    assert len(other) == 1


def test_private_torch_is_confined() -> None:
    """Torch's private modules are used in three files of ir (see also test_ir_infer.py)."""
    users = {}
    for path in sorted((ROOT / "ir").rglob("*.py")):
        names = [name for _, name in imported(path.read_text(), module_of(path))]
        private = {n for n in names if n.startswith(("torch._", "torch.fx.experimental"))}
        if private:
            users[path.name] = private
    assert set(users) <= {"infer.py", "pattern.py", "expand.py"}, users


def test_the_rooms_of_graftwork_have_an_order() -> None:
    folder = ROOT / "graftwork"
    rooms = {path.relative_to(folder).parts[0].removesuffix(".py") for path in folder.rglob("*.py")}
    assert rooms - {"__init__", "_clone", "demo_model"} == set(FRONT)
    for place, room in enumerate(FRONT):
        below = {*FRONT[place:], *ALLOWED}
        for path in sorted((folder / room).rglob("*.py")) or [folder / f"{room}.py"]:
            assert not violations(path.read_text(), module_of(path), below), path


def test_no_files_import_each_other_in_a_circle() -> None:
    """But for annotations, with the reason in a comment: ``if TYPE_CHECKING:  # why``."""
    parts = ("graftwork", *ALLOWED)
    files = [path for part in parts for path in sorted((ROOT / part).rglob("*.py"))]
    names = {".".join(module_of(path)).removesuffix(".__init__"): path for path in files}
    assert circles({name: path.read_text() for name, path in names.items()}) == []


def test_circles_are_seen() -> None:
    back = "if TYPE_CHECKING:{}\n    from .a import A\n"
    known = {"graftwork.p": "", "graftwork.p.a": "from .b import B\n"}
    assert circles({**known, "graftwork.p.b": back.format("")}) == [
        ["graftwork.p.a", "graftwork.p.b"]
    ]
    assert circles({**known, "graftwork.p.b": back.format("  # b knows a")}) == []


def late_imports(source: str) -> list[int]:
    """Lines in functions that import files of this package; none where a comment says why."""
    if "\n# Late imports: " in source:
        return []
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    inside = {node for fn in functions for node in ast.walk(fn)}
    return sorted(n.lineno for n in inside if isinstance(n, ast.ImportFrom) and n.level)


@pytest.mark.parametrize("part", [*ALLOWED, "graftwork"])
def test_no_file_needs_a_late_import(part: str) -> None:
    """Files that import each other are one file, or one too many: none waits for another's end.
    What is imported late because it takes a while has a comment: ``# Late imports: why``."""
    late = {str(p): late_imports(p.read_text()) for p in sorted((ROOT / part).rglob("*.py"))}
    assert not {path: lines for path, lines in late.items() if lines}


def test_late_imports_are_seen() -> None:
    source = "from .a import b\ndef f():\n    from .c import d\n    import torch\n"
    assert late_imports(source) == [3]
    assert late_imports(f"{source}\n# Late imports: c takes seconds.\n") == []
