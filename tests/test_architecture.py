"""The shape of the house, read off the syntax trees: imports flow one way, no drawer for everything."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SOURCES = sorted(
    [*REPOSITORY.glob("components/**/*.py"), *REPOSITORY.glob("recipes/**/*.py"), REPOSITORY / "registry.py"]
)

# What each room of components/ may import of the others. `parameters` and `interfaces` lie below all of them.
BASE = {"parameters", "interfaces"}
PARTS = {"mixers", "ffns", "wires", "heads", "losses"}
MAY_IMPORT = {
    "parameters": set(),
    "interfaces": set(),
    "kernels": set(),
    "layers": {"kernels"},
    "data": set(),
    "mixers": {"kernels", "layers"},
    "ffns": {"kernels", "layers"},
    "wires": {"kernels", "layers", "models.stack"},
    "heads": {"kernels", "layers", "ffns"},
    "losses": {"kernels", "layers", "data"},
    "models": {"kernels", "layers", "data"} | PARTS,
    "optimizers": {"kernels"},
    "schedules": set(),
    "checkpoint": set(),
    "metrics": set(),
    "parallel": {"models", "kernels", "ffns", "data"},
}


def imported(path: Path) -> list[str]:
    """The modules that a file imports, whole names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_imports_between_rooms_flow_one_way(room):
    files = [REPOSITORY / f"components/{room}.py", *(REPOSITORY / "components" / room).glob("**/*.py")]
    wrong = []
    for path in (f for f in files if f.exists()):
        for module in imported(path):
            parts = module.split(".")
            if parts[0] != "components" or parts[1] in {room, *BASE, *MAY_IMPORT[room]}:
                continue
            if ".".join(parts[1:3]) not in MAY_IMPORT[room]:
                wrong.append(f"{path.relative_to(REPOSITORY)} imports {module}")
    assert not wrong


def test_every_room_has_its_rule():
    rooms = {p.stem if p.suffix else p.name for p in (REPOSITORY / "components").iterdir()} - {
        "__init__",
        "__pycache__",
    }
    assert rooms == set(MAY_IMPORT)


def test_components_import_no_recipe_and_the_registry_only_the_standard_library():
    for path in SOURCES:
        inside = path.relative_to(REPOSITORY).parts[0]
        tops = {module.split(".")[0] for module in imported(path)}
        assert not (inside == "components" and "recipes" in tops), path
        assert inside != "registry.py" or tops <= set(__import__("sys").stdlib_module_names), tops


def test_models_reach_parts_only_through_the_registry():
    for path in (REPOSITORY / "components/models").glob("*.py"):
        assert not [
            m
            for m in imported(path)
            if m.startswith(("components.mixers", "components.ffns", "components.wires", "components.heads"))
        ]


def test_every_source_file_opens_with_what_it_is_and_none_is_a_drawer():
    for path in SOURCES:
        text = path.read_text()
        assert path.stem not in {"utils", "util", "helpers", "misc", "common"}, path
        assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_functions_are_short():
    """At most 60 lines, but for kernels, whose body is one thing; the median about 10."""
    lengths = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                is_kernel = any("jit" in ast.dump(d) for d in node.decorator_list)
                length = node.end_lineno - node.lineno + 1
                lengths.append(length)
                assert is_kernel or length <= 60, (
                    f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name} has {length}"
                )
    assert sorted(lengths)[len(lengths) // 2] <= 12
