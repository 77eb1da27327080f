"""A checkpoint that DeepSpeed wrote is called one, whatever reads it, with the way to go on from it."""

import re
from pathlib import Path

import pytest
import torch
from small_model import build, settings

from lamina.bench.__main__ import main
from lamina.engine import initialize
from lamina.engine.checkpoint.deepspeed import DeepSpeedCheckpointError, refuse_deepspeed
from lamina.zero import get_full

SMALL = {"width": 16, "hidden": 32, "blocks": 2}
KINDS = {
    "stage 3": ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "stage 2": ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "pipeline": ["layer_00-model_00-model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "experts": ["layer_0_expert_0_mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt"],
}


def made(folder: Path, files: list[str], *, latest: bool = True, script: bool = True) -> Path:
    """As DeepSpeed lays it out; the content does not matter, since it is not looked at."""
    (folder / "global_step4").mkdir(parents=True)
    for name in files:
        (folder / "global_step4" / name).write_bytes(b"\x80\x04.")
    if latest:
        (folder / "latest").write_text("global_step4")
    if script:
        (folder / "zero_to_fp32.py").write_text("")
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("latest", [True, False])
def test_every_way_of_loading_names_deepspeed_and_the_way_round(kind: str, latest: bool, tmp_path: Path) -> None:
    folder = made(tmp_path / "ds", KINDS[kind], latest=latest)
    command = re.escape(f"`python {folder / 'zero_to_fp32.py'} {folder} OUT`")
    told = rf"global_step4 was written by DeepSpeed \(.*_states\.pt.*{command}.*engine\.load_pretrained\('OUT'\)"
    with initialize(build(**SMALL), config=settings())[0] as engine:
        before = [get_full(parameter) for parameter in engine.module.parameters()]
        for path, tag in ((folder, None), (folder, "global_step4"), (folder / "global_step4", None)):
            with pytest.raises(DeepSpeedCheckpointError, match=told):
                engine.load_checkpoint(path, tag=tag)
        for path in (folder, folder / "global_step4", folder / "global_step4" / KINDS[kind][1]):
            with pytest.raises(DeepSpeedCheckpointError, match=told):
                engine.load_pretrained(path)
        assert all(map(torch.equal, before, [get_full(parameter) for parameter in engine.module.parameters()]))


@pytest.mark.parametrize("inside", [".", "global_step4", "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_the_planner_says_so_too(inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "ds", KINDS["stage 3"])
    assert main(["plan", str(folder / inside), "--machine", "rtx4090"]) == 2
    error = capsys.readouterr().err
    assert "was written by DeepSpeed" in error
    assert "zero_to_fp32.py" in error
    assert len(error.splitlines()) == 1


def test_without_the_script_its_name_is_given(tmp_path: Path) -> None:
    with pytest.raises(DeepSpeedCheckpointError, match=r"`zero_to_fp32\.py CHECKPOINT_FOLDER OUT`"):
        refuse_deepspeed(made(tmp_path, KINDS["stage 3"], script=False))


def test_whole_weights_of_a_run_without_zero_are_pointed_at_and_read(tmp_path: Path) -> None:
    """One file with the module's state dict beside plain values: at once, without DeepSpeed."""
    file = made(tmp_path, ["mp_rank_00_model_states.pt"], script=False) / "global_step4" / "mp_rank_00_model_states.pt"
    torch.manual_seed(3)
    weights = {name: torch.randn_like(value) for name, value in build(**SMALL).state_dict().items()}
    weights["head.weight"] = weights["embed.weight"]
    torch.save({"module": weights, "ds_version": "0.19.8", "global_steps": 4, "lr_scheduler": {"last": 4}}, file)
    with initialize(build(**SMALL), config=settings())[0] as engine:
        with pytest.raises(DeepSpeedCheckpointError, match=re.escape(f"engine.load_pretrained({str(file)!r})")):
            engine.load_checkpoint(tmp_path)
        engine.load_pretrained(file)
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(get_full(parameter), weights[name]), name


def test_universal_checkpoints_are_known(tmp_path: Path) -> None:
    (tmp_path / "latest_universal").write_text("global_step4_universal")
    with pytest.raises(DeepSpeedCheckpointError, match="latest_universal"):
        refuse_deepspeed(tmp_path)


@pytest.mark.filterwarnings("ignore:nothing was loaded")
def test_other_folders_are_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step4")
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / "notes.pt").touch()
    refuse_deepspeed(tmp_path)
    refuse_deepspeed(tmp_path / "nowhere")
    with initialize(build(**SMALL), config=settings())[0] as engine:
        with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
            engine.load_checkpoint(tmp_path)
        assert engine.load_checkpoint(tmp_path / "nowhere") == (None, {})
