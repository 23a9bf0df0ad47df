"""What the package promises from outside: its names, what importing costs, and the rules of the house as scans."""

from __future__ import annotations

import ast
import builtins
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import closeranks
from closeranks.cli.main import VERBS

SOURCE = Path(closeranks.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
CONFIGS = sorted(SOURCE.glob("*/config.py"))

PUBLIC = [
    "CloseranksError",
    "EarlyStop",
    "Hook",
    "Job",
    "Loss",
    "Result",
    "Session",
    "Step",
    "TensorBoard",
    "Tracker",
    "UserError",
    "__version__",
    "load_job",
    "train",
    "train_job",
]


def named(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def module_of(path: Path) -> str:
    return ".".join(["closeranks", *path.relative_to(SOURCE).with_suffix("").parts])


def loaded_by(*modules: str) -> set[str]:
    """The top-level packages in ``sys.modules`` of a fresh interpreter that has imported these modules."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return set(done.stdout.split())


# Names


def test_the_public_names_are_these_and_no_others() -> None:
    assert sorted(closeranks.__all__) == PUBLIC
    assert dir(closeranks) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads(name: str) -> None:
    value = getattr(closeranks, name)
    assert name == "__version__" or value.__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Sesion"):
        closeranks.Sesion  # noqa: B018


def test_a_type_checker_sees_the_names_that_load_late() -> None:
    """``__getattr__`` hides them from mypy; the block under TYPE_CHECKING must name each."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    declared = {
        alias.asname: f"{statement.module}:{alias.name}"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert declared == {name: f"{home}:{name}" for name, home in closeranks._HOMES.items()}


def test_the_version_is_the_projects() -> None:
    import tomllib

    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    assert closeranks.__version__ == project["version"]


# What importing costs


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("closeranks").isdisjoint({"torch", "numpy", "pydantic", "rich", "typer", "matplotlib"})


def test_the_command_line_answers_without_pydantic() -> None:
    verbs = [f"closeranks.cli.{module}" for module in VERBS.values()]
    assert loaded_by("closeranks.cli.main", *verbs).isdisjoint({"torch", "numpy", "pydantic", "matplotlib"})


@pytest.mark.parametrize(
    "module", ["closeranks.run.job.job", "closeranks.run.job.run_folder", "closeranks.run.job.launch"]
)
def test_checking_a_job_and_starting_workers_loads_no_torch(module: str) -> None:
    assert loaded_by(module).isdisjoint({"torch", "numpy", "matplotlib"})


def test_no_config_loads_torch_or_numpy() -> None:
    rooms = {path.parent.name for path in CONFIGS}
    assert rooms >= {"agent", "checkpoint", "data", "models", "optim", "parallel", "run", "sync", "telemetry"}
    configs = [path for path in CONFIGS if path.parent.name != "cli"]
    assert loaded_by(*map(module_of, configs)).isdisjoint({"torch", "numpy", "matplotlib"})


def test_a_loaded_package_is_seen() -> None:
    """The scan above can fail."""
    assert "torch" in loaded_by("closeranks.run.session")


# Rules of the house


def environment_reads(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in ("environ", "environb", "getenv"))


def test_the_environment_is_read_in_one_place() -> None:
    """``testing.world`` replaces a rank's whole environment by the one it was handed; that is writing."""
    found = {named(path) for path in FILES if list(environment_reads(ast.parse(path.read_text())))}
    assert found == {"core/system/environment.py", "testing/world.py"}
    world = (SOURCE / "testing" / "world.py").read_text()
    assert world.count("os.environ") == world.count("os.environ.") + world.count("os.environ[")
    assert world.count("os.environ.get") == 0
    assert list(environment_reads(ast.parse("import os\nos.environ['X']\nos.getenv('Y')"))) == [2, 3]


def test_package_files_are_empty() -> None:
    full = {named(path) for path in FILES if path.name == "__init__.py" and path.stat().st_size}
    assert full == {"__init__.py", "testing/__init__.py"}


def test_files_stay_short() -> None:
    lengths = {named(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 500} == {}
    assert lengths["run/session.py"] < 250


def test_the_session_does_no_arithmetic() -> None:
    """It counts finished steps and measures time; anything more has a room."""
    counting = {"self.num_done += 1"}
    tree = ast.parse((SOURCE / "run" / "session.py").read_text())
    arithmetic = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
    done = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, arithmetic)
    ]
    assert {text for text in done if not text.startswith("time.monotonic() - ")} == counting


def imported_from(tree: ast.Module) -> dict[str, str]:
    """Where each imported name of a file comes from."""
    return {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def isinstance_classes(tree: ast.Module) -> Iterator[str]:
    """The classes that calls of ``isinstance`` in a file name, unions and tuples taken apart."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            pending = [node.args[1]]
            while pending:
                kind = pending.pop()
                if isinstance(kind, ast.Tuple):
                    pending += kind.elts
                elif isinstance(kind, ast.BinOp):
                    pending += [kind.left, kind.right]
                else:
                    yield ast.unparse(kind)


def is_allowed(name: str, homes: dict[str, str]) -> bool:
    root = name.partition(".")[0]
    home = homes.get(root, root)
    return name == "Hook" or hasattr(builtins, name) or home.startswith(("torch", "collections", "closeranks.core"))


@pytest.mark.parametrize("path", sorted((SOURCE / "run").rglob("*.py")), ids=named)
def test_a_run_asks_no_room_what_kind_its_things_are(path: Path) -> None:
    tree = ast.parse(path.read_text())
    homes = imported_from(tree)
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert [name for name in isinstance_classes(tree) if name not in own and not is_allowed(name, homes)] == []


def test_the_scan_for_kinds_can_fail() -> None:
    tree = ast.parse("from closeranks.models.user import UserSpec\nisinstance(x, UserSpec | int)\nisinstance(y, Hook)")
    assert [name for name in isinstance_classes(tree) if not is_allowed(name, imported_from(tree))] == ["UserSpec"]


def test_every_module_imports() -> None:
    for path in FILES:
        if path.name not in ("__init__.py", "__main__.py", "zygote.py"):
            assert importlib.import_module(module_of(path)).__name__ == module_of(path)
