"""Runs inside the sandbox, by its path, with the standard library alone: limits itself, then runs what it is given."""

import json
import os
import resource
import signal
import sys
import threading
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PROCESSES = ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system", "os.kill", "os.killpg",
             "subprocess.Popen", "pty.spawn")  # fmt: skip
PATHS: dict[str, list[tuple[int, int]]] = {  # event: where a path stands, and the descriptor of the folder it is in
    "os.remove": [(0, 1)], "os.rmdir": [(0, 1)], "os.mkdir": [(0, 2)], "os.rename": [(0, 2), (1, 3)],
    "os.link": [(0, 2), (1, 3)], "os.symlink": [(1, 2)], "os.truncate": [(0, -1)], "os.chmod": [(0, 2)],
    "os.chown": [(0, 3)], "os.utime": [(0, 3)],
}  # fmt: skip
MAKING = ("os.mkdir", "os.link", "os.symlink")
FILES = 1_000  # how often a program may open a file to write, or make a folder or a link
TIMEOUT = 124  # exit status
STACK = 1 << 20  # bytes of address space for each thread, of which 8 MB are usual


def main() -> None:
    """Executes the job's program and then its tests, each compiled by itself, and writes the token after both.

    A program that ends early, redefines `exec` or leaves a text open at its end never gets to the token.
    """
    job = json.loads(sys.stdin.buffer.read())
    token, verdict = job["token"].encode(), job["verdict"]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _limit(job["limits"])
    threading.stack_size(STACK)
    sys.addaudithook(_guard(os.path.realpath(os.getcwd()), job["network"]))
    execute, translate, write, leave = exec, compile, os.write, os._exit
    names: dict[str, Any] = {"__name__": "answer"}
    execute(translate(job["program"], "<program>", "exec"), names)
    execute(translate(job["tests"], "<tests>", "exec"), names)
    write(verdict, token)
    leave(0)


def _limit(limits: dict[str, int]) -> None:
    def late(*_: Any) -> None:
        os._exit(TIMEOUT)

    signal.signal(signal.SIGXCPU, late)
    signal.signal(signal.SIGALRM, late)  # should its parent be gone
    signal.alarm(limits.pop("WALL") + 1)
    for name, most in limits.items():  # what hears no signal is killed a second of CPU later
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most + (name == "CPU")))


def _guard(home: str, network: bool) -> Any:
    """An audit hook, which no Python code takes off again: no other process, nothing written or removed outside of
    `home` and not too many files in it, and, unless the kernel has seen to it, no network."""
    made = 0

    def outside(path: Any, folder: Any = -1) -> bool:
        if isinstance(path, int):
            return False
        link = f"/proc/self/fd/{folder}"
        at = os.readlink(link) if isinstance(folder, int) and folder >= 0 and os.path.lexists(link) else ""
        whole = os.path.realpath(os.path.join(at, os.fsdecode(path)))
        return whole != os.devnull and not f"{whole}/".startswith(f"{home}/")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal made
        made += event in MAKING or (event == "open" and bool(arguments[2] & WRITING))
        if made > FILES:
            raise PermissionError(f"a program may write {FILES} files, and no more")
        if event == "open":
            path, _, flags = arguments
            if flags & WRITING and outside(path):
                raise PermissionError(f"a program may write in its own folder alone, not {path!r}")
        elif event in PROCESSES:
            raise PermissionError(f"a program may not start or end a process ({event})")
        elif not network and event.startswith("socket."):
            raise PermissionError(f"a program has no network ({event})")
        elif event in PATHS:
            for path, folder in PATHS[event]:
                if outside(arguments[path], arguments[folder] if folder >= 0 else -1):
                    raise PermissionError(f"a program may change its own folder alone, not {arguments[path]!r}")

    return hook


if __name__ == "__main__":
    main()
