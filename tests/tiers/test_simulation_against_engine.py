"""The simulated step moves the bytes that a real one moves; how long both take is for `lamina.bench simulate` to say."""

from pathlib import Path

import pytest
import torch

from lamina.bench.simulate import TOY, Outcome, Trial, job_of, main, trials
from lamina.bench.simulate_probe import measure

TIMES = {"forward_s": 0.01, "backward_s": 0.02, "adam_elements_per_s": 1e9}
CASES = [
    Trial(shape=TOY),
    Trial(shape=TOY, dtype="fp32", clip=1.0),
    Trial(shape=TOY, param="none"),
    Trial(shape=TOY, param="auto", optimizer="auto", device=1.0, host=8.0),
    Trial(shape=TOY, accumulation=2),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("trial", CASES, ids=lambda trial: trial.label)
def test_the_simulated_step_moves_the_bytes_of_the_real_one(trial: Trial, tmp_path: Path) -> None:
    result = measure(job_of(trial, str(tmp_path), steps=5, times=TIMES))
    told = result["predicted"]
    assert told["written_bytes"] == pytest.approx(result["written_bytes"], rel=0.01)
    # Which of two steps a prefetch between them is counted in is a matter of time.
    assert told["read_bytes"] == pytest.approx(result["read_bytes"], rel=0.12)
    for tier in ("device", "host"):
        assert told["peak_bytes"][tier] <= 1.02 * result["peak_bytes"][tier] + 4096 * 16


def test_an_outcome_holds_within_fifteen_percent() -> None:
    def outcome(predicted: float, error: str = "") -> Outcome:
        return Outcome(trial=CASES[0], predicted_s=predicted, measured_s=1.0, predicted={}, measured={}, error=error)

    assert [outcome(seconds).holds for seconds in (0.84, 0.86, 1.14, 1.16)] == [False, True, True, False]
    assert not outcome(1.0, "ran out of disk").holds


def test_there_are_at_least_eight_configurations_and_their_names_differ() -> None:
    labels = [trial.label for trial in trials([TOY, TOY, TOY.__class__(layers=5, dim=128, heads=4, seq=32)])]
    assert len(labels) >= 8


def test_wrong_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--nvme-path", str(tmp_path / "nowhere")])
    assert "nowhere: not a folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--only 'nothing like it'"):
        main(["--nvme-path", str(tmp_path), "--only", "nothing like it"])
