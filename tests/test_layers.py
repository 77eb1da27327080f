"""The five folders import strictly downward, and some of them may not know some libraries at all."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["aio_native", "tiers", "zero", "engine", "bench"]  # lowest first
TORCH_IN_TIERS = {"gpu.py"}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    package = ("lamina", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield node.lineno, module
            if module == "lamina":
                yield from ((node.lineno, f"lamina.{alias.name}") for alias in node.names)


def sources(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


def layer_violations(layer: str, path: Path) -> list[str]:
    higher = LAYERS[LAYERS.index(layer) + 1 :]
    found = []
    for line, module in imports_of(path):
        parts = module.split(".")
        if parts[0] in LAYERS:
            found.append(f"{path}:{line}: import lamina.{module}, not {module}")
        if parts[0] == "lamina" and len(parts) > 1 and parts[1] in higher:
            found.append(f"{path}:{line}: {layer} is below {parts[1]} and may not import it")
        if layer == "tiers" and parts[0] == "torch" and path.name not in TORCH_IN_TIERS:
            found.append(f"{path}:{line}: torch in tiers only in {sorted(TORCH_IN_TIERS)}")
        if layer == "aio_native" and parts[0] not in {*sys.stdlib_module_names, "cffi", "lamina"}:
            found.append(f"{path}:{line}: aio_native needs only cffi, not {parts[0]}")
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downward(layer: str) -> None:
    files = sources(layer)
    assert files, f"no sources in {layer}"
    assert [problem for path in files for problem in layer_violations(layer, path)] == []


def test_an_upward_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    bad = tmp_path / "tiers" / "deep" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text("from ...engine import initialize\nimport torch\nimport zero\nfrom .. import store\n")
    problems = layer_violations("tiers", bad)
    assert [int(problem.split(":")[1]) for problem in problems] == [1, 2, 3]


def test_files_stay_small() -> None:
    too_long = {
        str(path.relative_to(ROOT)): lines
        for layer in LAYERS
        for path in sources(layer)
        if (lines := len(path.read_text().splitlines())) > 500
    }
    assert too_long == {}
