"""How fast processes of this machine exchange bytes over its loop-back interface, as the ranks of a CPU machine do."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

NBYTES = 96 << 20
BLOCK = 1 << 20
TIMEOUT_S = 30.0


def exchange(connection: socket.socket, nbytes: int = NBYTES) -> float:
    """Send so many bytes and receive as many at the same time; the seconds that it took. Raises OSError when the other side
    ends early or is silent for TIMEOUT_S."""
    connection.settimeout(TIMEOUT_S)
    block = bytes(BLOCK)

    def send() -> None:
        with contextlib.suppress(OSError):  # the receiving half tells
            for _ in range(nbytes // BLOCK):
                connection.sendall(block)

    began = time.perf_counter()
    sender = threading.Thread(target=send, name="lamina-exchange")
    sender.start()
    into, got = bytearray(BLOCK), 0
    try:
        while got < nbytes:
            size = connection.recv_into(into)
            if not size:
                raise ConnectionError(f"the other process ended after {got:,} of {nbytes:,} bytes")
            got += size
    finally:
        sender.join()
    return time.perf_counter() - began


def peer_rate(nbytes: int = NBYTES) -> float:
    """Bytes per second that each of two processes sends to the other while it receives as many. Raises OSError."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        command = [sys.executable, "-m", "lamina.bench.plan_peers", str(server.getsockname()[1]), str(nbytes)]
        with subprocess.Popen(command) as other:
            try:
                connection, _ = server.accept()
                with connection:
                    return nbytes / exchange(connection, nbytes)
            finally:
                other.kill()


if __name__ == "__main__":
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=TIMEOUT_S) as to_parent:
        exchange(to_parent, int(sys.argv[2]))
