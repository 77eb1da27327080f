"""Two network namespaces joined by a virtual cable: two hosts on one machine, as far as torchrun can tell."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

ADDRESSES = ("10.213.77.1", "10.213.77.2")


class NotAllowed(Exception):
    """This process may not make network namespaces, or there is no iproute2."""


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Names for ``ip netns exec NAME``; the network interface in both is called ``cable``. Raises NotAllowed."""
    names = [f"lamina{os.getpid()}{side}" for side in "ab"]
    with ExitStack() as undo:
        for name in names:
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
        _ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                _ip("-n", name, "link", "set", interface, "up")
        yield names


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
    except FileNotFoundError as error:
        raise NotAllowed("there is no `ip` command (iproute2)") from error
    except subprocess.CalledProcessError as error:
        raise NotAllowed(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error
