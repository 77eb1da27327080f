"""lamina.zero.Init: a model whose values are never all in memory, with the values of an ordinary build."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from both_ways import built, differences, memory, nvme, train_plain, train_tiered
from odd_models import MODELS, WIDTH, Layer, Stack, tokens
from torch import nn

from lamina.zero import Init


class InitialisedFromTheTop(Stack):
    """As libraries do it: the finished model's weights are drawn anew, rows zeroed through .data, layers tied and cast."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self.draw)
        self.head.weight = self.embed.weight
        self.layers[1].half().float()
        with torch.no_grad():
            self.layers[2].norm.weight[3] = 7.0
            self.layers[3].up.weight.copy_(self.layers[0].up.weight * 2)
        self.scale = nn.Parameter(torch.tensor(1.0))

    @staticmethod
    def draw(part: nn.Module) -> None:
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.05)
        if isinstance(part, nn.Embedding):
            part.weight.data[3].zero_()
        if isinstance(part, nn.Linear) and part.bias is not None:
            part.bias.data.fill_(0.125)


def under_init(build: Callable[[], nn.Module], **options: object) -> Callable[[], nn.Module]:
    def run() -> nn.Module:
        with Init(**options):
            return build()

    return run


def test_parameters_are_placeholders_and_the_random_stream_is_the_same() -> None:
    built(Stack)
    wanted = torch.rand(4)
    module = built(under_init(InitialisedFromTheTop, open_bytes=0))
    assert all(torch.isnan(parameter).all() for parameter in module.parameters())
    assert module.head.weight is module.embed.weight
    built(under_init(Stack))
    assert torch.equal(torch.rand(4), wanted)


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("open_bytes", [0, 1 << 20])
@pytest.mark.parametrize("build", [InitialisedFromTheTop, MODELS["Scalars"], MODELS["Adapted"]])
def test_training_equals_an_ordinary_build(
    build: Callable[[], nn.Module], open_bytes: int, where: str, tmp_path: Path
) -> None:
    config = nvme(tmp_path) if where == "file" else memory()
    found = train_tiered(under_init(build, config=config, open_bytes=open_bytes), tokens, config)
    assert list(differences(found, train_plain(build, tokens))) == []
    assert list(tmp_path.iterdir()) == []


def test_weights_can_be_loaded_inside_the_block(tmp_path: Path) -> None:
    other = {name: value + 1 for name, value in built(Stack).state_dict().items()}

    def loaded() -> nn.Module:
        module = Stack()
        module.load_state_dict(other)
        return module

    config = nvme(tmp_path)
    assert (
        list(differences(train_tiered(under_init(loaded, config=config), tokens, config), train_plain(loaded, tokens)))
        == []
    )


def test_a_meta_model_gets_its_values_module_by_module(tmp_path: Path) -> None:
    def deferred() -> nn.Module:
        with Init(nvme_path=tmp_path) as init:
            with torch.device("meta"):
                module = MODELS["TiedBlocks"]()
            return init.materialize(module)

    def ordinary() -> nn.Module:
        """The same draws in the same order: as the ties were made before the values."""
        module = MODELS["TiedBlocks"]()
        torch.manual_seed(0)
        seen: set[int] = set()
        for part in module.modules():
            own = [parameter for parameter in part.parameters(recurse=False) if id(parameter) not in seen]
            seen.update(id(parameter) for parameter in own)
            if own:
                part.reset_parameters()
        return module

    assert list(differences(train_tiered(deferred, tokens, nvme(tmp_path)), train_plain(ordinary, tokens))) == []


def test_meta_modules_without_a_way_to_get_values_are_refused_by_name() -> None:
    class Scaled(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

    with torch.device("meta"):
        module = nn.Sequential(Scaled())
    with Init() as init, pytest.raises(TypeError, match=r"0 \(Scaled\): no reset_parameters"):
        init.materialize(module)


def test_nothing_is_left_hooked_also_after_an_error() -> None:
    def fail() -> None:
        with Init():
            raise LookupError(nn.Sequential(nn.Linear(2, 2)))

    with pytest.raises(LookupError):
        fail()
    assert not torch.isnan(nn.Sequential(nn.Linear(2, 2))[0].weight).any()


PEAK = """
    import json, sys, torch
    from pathlib import Path
    from torch import nn
    from lamina.zero import Init
    from lamina.engine import initialize
    torch.set_num_threads(1)

    def peak():
        line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def build(): return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(40)))

    config = json.loads(sys.argv[1])
    build_small = nn.Sequential(nn.Linear(1024, 1024))  # pages and code that any build touches
    del build_small
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = peak()
    if sys.argv[2] == "init":
        with Init(config=config):
            model = build()
    else:
        model = build()
    print(json.dumps(peak() - start))
"""


def test_the_peak_of_a_build_is_a_few_modules_not_the_model(tmp_path: Path) -> None:
    """Case B-04 on one rank: 160 MiB of parameters; freed blocks count until they are given back (32 MiB at a time)."""
    peaks = {}
    for kind in ("init", "plain"):
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PEAK), json.dumps(nvme(tmp_path)), kind],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        peaks[kind] = int(run.stdout)
    assert peaks["plain"] > 150 << 20, peaks
    assert peaks["init"] < 60 << 20, peaks
