"""Every package folder is in the wheel, and nothing that does not belong there."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["aio_native", "tiers", "zero", "engine", "bench"]


def package_folders() -> set[str]:
    return {
        "lamina." + ".".join(init.relative_to(ROOT).parent.parts)
        for layer in LAYERS
        for init in (ROOT / layer).rglob("__init__.py")
    }


def test_every_package_folder_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == package_folders()
    assert {f"lamina.{layer}": layer for layer in LAYERS}.items() <= settings["package-dir"].items()


@pytest.mark.timeout(300)
def test_wheel_holds_every_source_and_extension(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        cwd=source, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {f"lamina/{path.relative_to(ROOT)}" for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == wanted
    assert "lamina/zero/_kernels.abi3.so" in names
    assert not [name for name in names if name.endswith((".c", ".h"))]
    assert "lamina/__init__.py" not in names
