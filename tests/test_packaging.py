"""What people install is the wheel, not this folder: it must hold everything and run from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import closeranks

SOURCE = Path(closeranks.__file__).parent
ROOT = SOURCE.parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True, timeout=300)
    return folder


def python(installed: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """An interpreter that finds the installed wheel before this folder, and everything else where it is."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=True, timeout=300
    )


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    wanted = {f"closeranks/{path.relative_to(SOURCE)}" for path in SOURCE.rglob("*.py")}
    assert wanted <= held
    assert "closeranks/py.typed" in held
    assert any(name.endswith("/LICENSE") for name in held)
    assert not [name for name in held if name.startswith(("tests/", "benchmarks/", "examples/"))]


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = archive.read(name).decode()
        scripts = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "Requires-Dist: torch<2.14,>=2.11" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert f"Version: {closeranks.__version__}\n" in metadata
    assert "closeranks = closeranks.cli.main:main" in scripts


def test_the_installed_package_is_the_one_that_runs(installed: Path, tmp_path: Path) -> None:
    found = python(installed, "-c", "import closeranks; print(closeranks.__file__)", cwd=tmp_path).stdout.strip()
    assert Path(found) == installed / "closeranks" / "__init__.py"
    said = python(installed, "-m", "closeranks", "--version", cwd=tmp_path).stdout
    assert said == f"closeranks {closeranks.__version__}\n"


def test_a_job_is_checked_from_the_installed_package(installed: Path, tmp_path: Path) -> None:
    printed = python(installed, "-m", "closeranks", "config", str(ROOT / "examples" / "tiny.toml"), cwd=tmp_path).stdout
    assert 'preset = "tiny"' in printed
