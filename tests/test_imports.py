"""The arrows between modules: no circles, and no room imports one above it. Imports in functions
and for type checkers count too.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from benchmarks import words

import isotype

PACKAGE = Path(isotype.__file__).parent

# a room imports rooms before it in this list, and rooms of its own line
LEVELS = [
    {"version", "lazy_attributes"},
    {"errors", "instance_method", "wording"},
    {"dtypes", "finding"},
    {"pages"},
    {"environment"},
    {"precision", "config"},
    {"observe"},
    {"runs"},
    {"ops", "data"},
    {"lora", "doctor"},
    {"optimize", "report", "translate", "testing"},
    {"model"},
    {"distributed"},
    {"training"},
    {"tasks"},
    {"integrations"},
    {"inference"},
    {"entry"},
    {"quickstart"},
    {"quickstart_pictures"},
    {"proof"},
    {"cli"},
    {"isotype", "__main__", "hook"},
]
# arrows that design.md forbids whatever the levels say: the doctor uses no part of the engine, the
# loop no task, the engine no doctor
FORBIDDEN = [
    (
        "doctor",
        {
            "ops",
            "lora",
            "optimize",
            "training",
            "tasks",
            "model",
            "inference",
            "data",
            "runs",
            "testing",
        },
    ),
    ("training", {"tasks"}),
    *(
        (room, {"doctor", "testing"})
        for room in (
            "precision",
            "observe",
            "ops",
            "lora",
            "optimize",
            "model",
            "training",
            "tasks",
            "distributed",
        )
    ),
]


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """What the module's text imports, wherever it stands: `from .a import b` is a module `a.b`
    where there is one, else `a`.
    """
    found = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in words.walk_statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                if node.level
                else ""
            )
            base = ".".join(filter(None, (parent, node.module)))
            found |= {
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
                for alias in node.names
            }
    return {other for other in found if other in known and other != name}


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(name, path, known) for name, path in known.items()}


def room(name: str) -> str:
    return (name.split(".") + ["isotype"])[1] if "." in name else "isotype"


def test_no_modules_import_one_another_in_a_circle(arrows):
    TopologicalSorter(arrows).prepare()  # a CycleError names them


def test_every_room_has_a_level(arrows):
    assert {room(name) for name in arrows} <= set().union(*LEVELS), (
        "give the new room its line in LEVELS"
    )


def test_arrows_between_rooms_point_downwards(arrows):
    level = {name: i for i, names in enumerate(LEVELS) for name in names}
    upwards = [
        f"{name} imports {other}"
        for name, others in arrows.items()
        for other in others
        if name != "isotype"
        and room(name) != room(other)
        and level[room(other)] >= level[room(name)]
    ]
    forbidden = [
        f"{name} imports {other}"
        for name, others in arrows.items()
        for other in others
        for above, below in FORBIDDEN
        if room(name) == above and room(other) in below
    ]
    kinds = {
        name: name.split(".")[2]
        for name in arrows
        if name.startswith(("isotype.tasks.language", "isotype.tasks.diffusion"))
    }
    forbidden += [
        f"{name} imports {other}"
        for name in kinds
        for other in arrows[name] & kinds.keys()
        if kinds[name] != kinds[other]
    ]
    assert sorted(upwards + forbidden) == []


def hidden_modules(package: Path) -> set[str]:
    """Modules of this package that its `__init__` hides behind a function or class of their name."""
    modules = {path.stem for path in package.iterdir()}
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name for node in imports for alias in node.names} & modules


def test_no_package_hides_a_module_behind_a_function_of_its_name(tmp_path):
    packages = [path.parent for path in PACKAGE.rglob("__init__.py")]
    assert {
        package: hidden_modules(package) for package in packages if hidden_modules(package)
    } == {}
    (tmp_path / "attach.py").touch()
    (tmp_path / "__init__.py").write_text("from .attach import attach\n")
    assert hidden_modules(tmp_path) == {"attach"}
