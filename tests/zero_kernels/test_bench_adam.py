"""The Adam benchmark at toy size: its table, its JSON line, its refusals."""

import json

import pytest

from lamina.bench import adam
from lamina.bench.adam import main


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "REST_S", 0.0)


def test_json_line_has_a_row_for_each_contender_and_size(capsys):
    assert main(["--threads", "1,2", "--sizes", "1000,2e4", "--rounds", "3", "--json"]) == 0
    out = capsys.readouterr().out.strip().splitlines()
    assert len(out) == 1
    report = json.loads(out[0])
    rows = {(r["threads"], r["numel"], r["name"]): r for r in report["rows"]}
    names = {name for _, _, name in rows}
    assert {"lamina fp32", "lamina bf16", "CPUAdam fp32", "torch fused", "torch fused mixed", "torch default"} <= names
    assert {(t, n) for t, n, _ in rows} == {(t, n) for t in (1, 2) for n in (1000, 20_000)}
    for (_, numel, _), row in rows.items():
        assert row["ms"] > 0
        assert row["first_ms"] > 0
        assert row["gparam_per_s"] == pytest.approx(numel / row["ms"] / 1e6)
    ceilings = [r["of_ceiling"] for r in report["rows"] if r["name"].startswith("stream")]
    assert max(ceilings) <= 1.0
    assert rows[1, 1000, "CPUAdam fp32"]["times torch fused"] > 0


def test_table_is_printed_before_the_json_line(capsys):
    assert main(["--threads", "1", "--sizes", "5000", "--rounds", "2", "--no-default", "--path", "portable"]) == 0
    out = capsys.readouterr().out.strip().splitlines()
    assert "path portable" in out[0]
    assert any("lamina bf16" in line for line in out)
    assert json.loads(out[-1])["path"] == "portable"
    assert not any("torch default" in line for line in out)


@pytest.mark.parametrize("arguments", [["--sizes", "many"], ["--threads", "0"], ["--sizes", ""]])
def test_senseless_arguments_are_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err
