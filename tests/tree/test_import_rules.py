"""Who may import whom: the layers of docs/architecture.md, checked in the source text."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


#: The floors from the ground up. A room may import itself and the floors below.
FLOORS = (
    ("leaves",),
    ("launchers", "recordings"),
    ("native",),
    ("store", "codec"),
    ("backends",),
    ("groups",),
    ("collectives",),
    ("startup",),
    ("mesh", "nn"),
    ("parallel",),
    ("optim", "data", "torch", "debug", "testing", "elastic"),
    ("cli", "aliases"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

#: What lies at the top of the package, by room; each folder is a room of its own.
FILES = {
    "leaves": (
        *(
            "errors",
            "dtypes",
            "config",
            "log",
            "hardware",
            "operations",
            "debug_level",
            "flight_recorder",
            "profiler_events",
        ),
        *("_intel", "_libmpi", "_loader", "_loader_texts", "_option", "_build_info"),
        *("_torch_version", "_dump_files", "_environment", "_device_options", "_store_options"),
    ),
    "native": (
        *("typing", "_engine", "_bench", "_buffer", "_graph", "_ops", "_nccl_loader", "_nccl"),
    ),
    "store": ("_store",),
    "data": ("data",),
    "cli": ("__main__",),
    # module paths of torch's and of older releases: they lead to the rooms and hold nothing
    "aliases": ("group", "device_mesh", "distributed_c10d", "rendezvous", "algorithms"),
}
ROOMS = {room: room for room in FLOOR} | {
    file: room for room, files in FILES.items() for file in files
}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.glob("hpcdist/**/*.py"))
}
MODULES = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}


def room_of(module: str) -> str:
    first = module.split(".")[1]
    assert first in ROOMS, f"hpcdist/{first} has no room: put it into ROOMS, and keep it there"
    return ROOMS[first]


def imports(path: Path, module: str) -> set[str]:
    """Modules of ours that a file imports, by full name; also late, or for type checkers alone."""
    tree = ast.parse(path.read_text())
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]) if base else ".".join(above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                native = base == "hpcdist" and alias.name in ROOMS
                found.add(full if full in MODULES or native else base)
        todo.extend(ast.iter_child_nodes(node))
    return {name for name in found if name.partition(".")[0] == "hpcdist"}


def test_there_is_something_to_check():
    assert {"hpcdist.group", "hpcdist.collectives.reduce", "hpcdist.launchers.base"} <= set(MODULES)
    assert "hpcdist.launchers" in imports(
        MODULES["hpcdist.startup.rendezvous.mpi"], "hpcdist.startup.rendezvous.mpi"
    )


@pytest.mark.parametrize("module", [name for name in MODULES if name != "hpcdist"])
def test_imports_go_down(module):
    room = room_of(module)
    for imported in imports(MODULES[module], module):
        if room == "aliases" and imported == "hpcdist":
            continue
        assert imported != "hpcdist", f"{module} imports the package itself, which imports all"
        other = room_of(imported)
        down = FLOOR[other] < FLOOR[room]
        assert other == room or down, f"{module} ({room}) may not import {imported} ({other})"


def test_nothing_imports_cli():
    for module, path in MODULES.items():
        if not module.startswith(("hpcdist.cli", "hpcdist.__main__")):
            assert not any(name.startswith("hpcdist.cli") for name in imports(path, module)), module


def test_no_circles():
    graph = {
        module: {name for name in imports(path, module) if name in MODULES}
        for module, path in MODULES.items()
        if module != "hpcdist" and room_of(module) != "aliases"
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "a circle of imports: " + " -> ".join((*trail, module))
        if module not in done:
            for name in graph[module]:
                if name != module:
                    visit(name, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_a_carriers_type_stands_below_all_that_carries():
    module = "hpcdist.backends.carrier"
    assert imports(MODULES[module], module) == {"hpcdist._engine", "hpcdist.typing"}


def test_native_modules_import_down():
    """lib*.pxd -> _ops, _buffer -> _engine; of the Python layer: leaves and launchers only."""
    order = ["libmpi", "libnccl", "dlpack", "_errors", "_ops", "_buffer", "_nccl_loader"]
    sources = [*ROOT.glob("pyx/hpcdist/*.px[di]"), *ROOT.glob("pyx/hpcdist/*.pyx")]
    assert sources
    for source in sources:
        name = source.stem
        allowed = order[: order.index(name)] if name in order else [*order, name]
        for line in source.read_text().splitlines():
            match = re.match(
                r"\s*(?:from\s+(?:hpcdist|\.)\.?(\w*)\s+c?import\s+(\w+)|c?import\s+hpcdist\.(\w+))",
                line,
            )
            if match:
                used = match[1] or match[3] or match[2]
                below = (*allowed, name, "errors", "config", "_loader", "launchers")
                assert used in below, f"{source.name}: {line.strip()}"


@pytest.mark.parametrize(
    "module", ["hpcdist", "hpcdist.launchers", "hpcdist.store", "hpcdist.startup.rendezvous"]
)
def test_imports_without_torch_and_without_starting_mpi(module):
    program = f"""
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not here")
sys.meta_path.insert(0, NoTorch())
import {module}
from hpcdist import _engine
print(_engine.mpi_state())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "none", done.stderr


def test_importing_changes_no_environment():
    program = """
import os
before = dict(os.environ)
import hpcdist, hpcdist.parallel, hpcdist.data, hpcdist.testing
print(dict(os.environ) == before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "True", done.stderr


def test_only_packages_and_the_reference_need_a_list_of_names():
    """Elsewhere the underscore says it, and a list would say it again."""
    pages = "".join(page.read_text() for page in ROOT.glob("docs/api/*.rst"))
    named = set(re.findall(r"^(?:\.\. names:: |   )(hpcdist[.\w]*)$", pages, re.M))
    assert {"hpcdist.config", "hpcdist.data", "hpcdist.nn.functional"} <= named
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        bound = {
            target.id: statement.value
            for statement in tree.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        if "__all__" not in bound or path.name == "__init__.py" or module in named:
            continue
        listed = {
            node.value for node in ast.walk(bound["__all__"]) if isinstance(node, ast.Constant)
        }
        imported = {
            alias.asname or alias.name
            for statement in tree.body
            if isinstance(statement, ast.ImportFrom)
            for alias in statement.names
        }
        assert listed & imported, f"{module} needs no __all__: it re-exports no name"


def test_all_is_what_can_be_imported():
    import hpcdist

    assert sorted(hpcdist.__all__) == sorted(set(hpcdist.__all__))
    for name in hpcdist.__all__:
        assert getattr(hpcdist, name) is not None, name
    assert set(hpcdist.__all__) <= set(dir(hpcdist))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hpcdist.nothing  # noqa: B018
