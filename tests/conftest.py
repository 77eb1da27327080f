"""What every test has in common: neither a profile of this user's disks nor how pytest was started decides what happens."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples in every run, and none is timed: neither luck nor how busy the machine is decides. For other examples:
# --hypothesis-profile=default.
settings.register_profile("hermetic", deadline=None, derandomize=True)
settings.load_profile("hermetic")

ONE_THREAD = ("engine", "zero", "zero_models")
"""Folders of tests that train small matrices: more threads only make them slower, and results must not depend on it anyway."""


OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a shell under torchrun, or in a job of a cluster, has in its environment."""


@pytest.fixture(autouse=True, scope="session")
def _own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in OF_A_LAUNCHER:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _signals_as_on_a_terminal() -> Iterator[None]:
    """A shell starts what it runs in the background with Ctrl-C ignored, nohup with SIGHUP, which everything started from there
    inherits."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    ignored = [number for number in usual if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, usual[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.parent.name not in ONE_THREAD:
        yield
        return
    import torch  # only here: other tests start faster without it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
