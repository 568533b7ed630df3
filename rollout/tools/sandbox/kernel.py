"""What the kernel is asked to enforce on a process before untrusted code runs in it.

Runs inside the sandboxed process, which imports nothing of this package: standard library only.
Everything here works without privileges; what a kernel does not have is reported, never assumed.

Sources: seccomp(2), landlock(7) and the kernel's system call tables (arch/x86/entry/syscalls/
syscall_64.tbl, include/uapi/asm-generic/unistd.h).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterable, Mapping

__all__ = ["CHECKS", "confine"]

CHECKS = ("limits", "privileges", "files", "processes", "network")
"""What can be enforced, in the order in which it is done.

limits: CPU seconds, address space, size of a file, open files. privileges: no capabilities, none to
be gained. files: reads only of Python and system libraries, writes only below the work folder.
processes: no new process, no signal to others, no leaving the process group. network: no socket.
"""

_DENIED: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "x86_64": {
        # fork, vfork, execve, execveat, kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, setpgid,
        # setsid, ptrace, process_vm_readv, process_vm_writev, pidfd_send_signal, pidfd_open,
        # pidfd_getfd
        "processes": (57, 58, 59, 322, 62, 200, 129, 297, 109, 112, 101, 310, 311, 424, 434, 438),
        # socket, connect, accept, accept4, bind, listen, io_uring_setup, _enter, _register
        "network": (41, 42, 43, 288, 49, 50, 425, 426, 427),
        # unshare, setns, mount, umount2, pivot_root, chroot, bpf, perf_event_open, userfaultfd,
        # add_key, request_key, keyctl
        "privileges": (272, 308, 165, 166, 155, 161, 321, 298, 323, 248, 249, 250),
        # memory that is not address space: memfd_create, memfd_secret, shmget, semget, msgget,
        # mq_open; and setrlimit
        "limits": (319, 447, 29, 64, 68, 240, 160),
    },
    "aarch64": {
        "processes": (221, 281, 129, 130, 138, 240, 154, 157, 117, 270, 271, 424, 434, 438),
        "network": (198, 203, 202, 242, 200, 201, 425, 426, 427),
        "privileges": (97, 268, 40, 39, 41, 51, 280, 241, 282, 217, 218, 219),
        "limits": (279, 447, 194, 190, 186, 180, 164),
    },
}
_SPECIAL = {
    # clone, clone3, tgkill, prlimit64, socketpair
    "x86_64": (56, 435, 234, 302, 53),
    "aarch64": (220, 435, 131, 261, 199),
}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NUMBER, _ARCH = 0, 4
_CLONE_THREAD = 0x10000

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_libc = ctypes.CDLL(None, use_errno=True)


def confine(limits: Mapping[str, int], *, writable: str, readable: Iterable[str]) -> dict[str, str]:
    """Enforce what this kernel can, for good, on this process.

    `limits` are `cpu_s`, `memory_bytes`, `file_bytes`. Files are read below `readable`, and read
    and written below `writable`. Returns, for each of `CHECKS`, '' where it is enforced, else why
    not.
    """
    found: dict[str, str] = {}
    _try(found, "limits", lambda: _set_limits(limits))
    _try(found, "privileges", _drop_privileges)
    _try(found, "files", lambda: _restrict_files(writable, readable))
    _try(found, "processes", _filter_calls)
    found["network"] = found["processes"]
    return found


def _try(found: dict[str, str], name: str, enforce: object) -> None:
    try:
        enforce()  # type: ignore[operator]
    except (OSError, ValueError, NotImplementedError) as error:
        found[name] = f"{type(error).__name__}: {error}"
    else:
        found[name] = ""


def _call(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _set_limits(limits: Mapping[str, int]) -> None:
    cpu = limits["cpu_s"]
    for kind, soft, hard in (
        # The soft limit sends SIGXCPU, which says what happened; the hard one kills.
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
        # Not for root, and per user elsewhere: the filter of calls is what bounds processes.
        (resource.RLIMIT_NPROC, 256, 256),
    ):
        old = resource.getrlimit(kind)[1]
        if old != resource.RLIM_INFINITY:
            soft, hard = min(soft, old), min(hard, old)
        resource.setrlimit(kind, (soft, hard))


def _drop_privileges() -> None:
    # A child of a worker that dies goes with it.
    _call("prctl(PDEATHSIG)", _libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0))
    _call("prctl(NO_NEW_PRIVS)", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header = struct.pack("Ii", 0x20080522, 0)
    _call("capset", _libc.capset(header, bytes(24)))


_FILE_RIGHTS = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)
_READ = (1 << 2) | (1 << 3)
_MAKE = (1 << 6) | (1 << 9) | (1 << 10) | (1 << 11)
"""Character devices, sockets, pipes and block devices: never."""


def _restrict_files(writable: str, readable: Iterable[str]) -> None:
    version = _libc.syscall(444, None, 0, 1)
    if version < 1:
        raise NotImplementedError("this kernel has no Landlock")
    handled = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        handled |= (1 << bit) if version >= since else 0
    attributes = struct.pack("QQQ", handled, 3, 3)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _call("landlock_create_ruleset", _libc.syscall(444, attributes, size, 0))
    for path in readable:
        _allow(rules, path, _READ)
    for device in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        _allow(rules, device, _READ | ((1 << 1) if device == "/dev/null" else 0))
    _allow(rules, writable, handled & ~_MAKE & ~1)
    _call("landlock_restrict_self", _libc.syscall(446, rules, 0))
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, folder)
        _call("landlock_add_rule", _libc.syscall(445, rules, 1, rule, 0))
    finally:
        os.close(folder)


def _filter_calls() -> None:
    machine = platform.machine()
    if machine not in _DENIED:
        raise NotImplementedError(f"the system calls of {machine} are not known here")
    program = b"".join(struct.pack("HBBI", *one) for one in _program(machine))
    code = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    _call("prctl(SECCOMP)", _libc.prctl(_PR_SET_SECCOMP, 2, head, 0, 0))


def _program(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter: calls that are denied answer EPERM, all others pass."""
    refuse = (_RETURN, 0, 0, 0x50000 | errno.EPERM)
    missing = (_RETURN, 0, 0, 0x50000 | errno.ENOSYS)
    allow = (_RETURN, 0, 0, _ALLOW)
    clone, clone3, tgkill, prlimit, socketpair = _SPECIAL[machine]
    lines = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        # The x32 calls have numbers of their own; nothing here uses them.
        lines += [(_AT_LEAST, 0, 1, 0x40000000), refuse]
    for numbers in _DENIED[machine].values():
        for number in numbers:
            lines += [(_EQUAL, 0, 1, number), refuse]
    blocks = {
        # Threads pass, processes do not.
        clone: [_argument(0), (_ANY_BIT, 1, 0, _CLONE_THREAD), refuse, allow],
        # Its flags lie in memory that a filter cannot read; glibc then calls clone.
        clone3: [missing],
        # abort() sends to itself.
        tgkill: [_argument(0), (_EQUAL, 1, 0, os.getpid()), refuse, allow],
        # Limits may be asked, not set.
        prlimit: [
            *(_argument(2), (_EQUAL, 1, 0, 0), refuse),
            *(_argument(2, 4), (_EQUAL, 1, 0, 0), refuse, allow),
        ],
        # A pair that can reach only itself: AF_UNIX, SOCK_STREAM (asyncio wakes itself by one).
        socketpair: [
            *(_argument(0), (_EQUAL, 1, 0, 1), refuse),
            *(_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, 1), refuse, allow),
        ],
    }
    for number, block in blocks.items():
        lines += [(_EQUAL, 0, len(block), number), *block]
    return [*lines, allow]


def _argument(number: int, half: int = 0) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, 16 + 8 * number + half)
