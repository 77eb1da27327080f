"""Runs Python with io_uring forbidden by a seccomp filter, as container runtimes do: `ring_ban.py EPERM -m pytest …`.

Needs no privilege (no_new_privs) and holds for the process and its children only.
"""

import ctypes
import errno
import os
import struct
import sys

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000
LOAD_WORD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
RING_CALLS = (425, 426, 427)  # io_uring_setup, _enter, _register on every architecture


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def forbid(number: int) -> None:
    """From now on the three io_uring calls fail with errno `number`."""
    code = [(LOAD_WORD, 0, 0, 0)]  # the number of the call
    for position, call in enumerate(RING_CALLS):
        code.append((JUMP_EQUAL, len(RING_CALLS) - position, 0, call))
    code += [(RETURN, 0, 0, RET_ALLOW), (RETURN, 0, 0, RET_ERRNO | number)]
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    program = Program(len(code), packed)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp is not to be had here")


if __name__ == "__main__":
    forbid(getattr(errno, sys.argv[1]))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
