"""Programs that do what they must not, in the sandbox that is used here and in the one without namespaces."""

import os
import time

import pytest

from decodelab.errors import UserError
from decodelab.experiments.quality import sandbox
from decodelab.experiments.quality.sandbox import Limits, network_isolation, run_tests

LIMITS = Limits(timeout=1.0, memory_mb=512, file_mb=1)
TESTS = "assert f() == 1"
RIGHT = "def f():\n    return 1\n"
WRONG = "def f():\n    return 2\n"


@pytest.fixture(params=["namespace", "blocked sockets"])
def isolation(request, monkeypatch):
    if request.param != "namespace":
        monkeypatch.setattr(sandbox, "network_isolation", lambda: request.param)
    elif network_isolation() != "namespace":
        pytest.skip("the kernel gives no namespaces to this user")
    return request.param


def reason(program: str, tests: str = TESTS, limits: Limits = LIMITS) -> str:
    verdict = run_tests(program, tests, limits)
    assert not verdict.passed
    return verdict.reason


def test_a_program_passes_or_fails_by_its_tests(isolation):
    assert run_tests(RIGHT, TESTS, LIMITS) == sandbox.Verdict(True, "passed", "", isolation)
    verdict = run_tests(WRONG, TESTS, LIMITS)
    assert (verdict.passed, verdict.reason) == (False, "failed: AssertionError")
    assert reason("def f(:") == "failed: SyntaxError: invalid syntax"
    assert reason(RIGHT, "assert g() == 1") == "failed: NameError: name 'g' is not defined"


@pytest.mark.parametrize(
    "program",
    [
        "print('passed')",
        "import os; print('passed', flush=True); os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit('passed')",
        "def f():\n    import os; os._exit(0)",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None\n" + WRONG,
        "import os\nos._exit = print\n" + WRONG,
        "import os\nfor fd in range(3, 60):\n    try: os.write(fd, b'passed')\n    except OSError: pass\n" + WRONG,
        "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
        "import sys\nsys.excepthook = lambda *a: None\n" + WRONG,
        "text = '''" + WRONG,
    ],
)
def test_a_verdict_cannot_be_forged(program):
    assert reason(program, "'''\nassert f() == 1\n'''" if program.startswith("text") else TESTS) != "passed"


def test_a_text_that_is_left_open_does_not_swallow_the_tests():
    assert "SyntaxError" in reason("x = '''", "'''\nassert False")


def test_a_program_may_leave_threads_and_print(isolation):
    idle = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nprint('hello')\n"
    verdict = run_tests(idle + RIGHT, TESTS, LIMITS)
    assert verdict.passed
    assert run_tests("x = 1\nif __name__ == '__main__':\n    x = input()\n", "assert x == 1", LIMITS).passed


def test_endless_loops_end_by_processor_time(isolation, monkeypatch):
    monkeypatch.setattr(Limits, "wall", 20.0)
    assert reason("try:\n    while True: pass\nexcept BaseException: pass\n" + RIGHT) == "timeout"


def test_limits_are_in_force(isolation):
    processes = "(256,) * 2" if isolation == "namespace" else "r.getrlimit(r.RLIMIT_NPROC)"  # the user's, not ours
    program = (
        "import resource as r\n"
        "def f():\n    limits = [r.getrlimit(getattr(r, 'RLIMIT_' + name)) for name in NAMES]\n"
        f"    assert limits == [(1, 2), (512 << 20,) * 2, (1 << 20,) * 2, {processes}, (64,) * 2, (0, 0)], limits\n"
        "    return 1\n"
        "NAMES = ['CPU', 'AS', 'FSIZE', 'NPROC', 'NOFILE', 'CORE']\n"
    )
    assert run_tests(program, TESTS, LIMITS).reason == "passed"


def test_waiting_ends_by_the_clock(monkeypatch):
    monkeypatch.setattr(Limits, "wall", 0.3)
    assert reason("import time; time.sleep(60)") == "timeout"


def test_memory_is_bounded(isolation):
    patient = Limits(timeout=30.0, memory_mb=512, file_mb=1)  # a busy machine fills 512 MB in more than a second
    assert reason("x = bytearray(1 << 30)", limits=patient) == "memory"
    assert reason("x = []\nwhile True: x.append('a' * 10**6)", limits=patient) == "memory"


def test_many_threads_fit_into_the_memory(isolation):
    """glibc reserves 8 MB of address space for a thread's stack and 64 MB for its arena."""
    program = (
        "import threading\n"
        "def f():\n    end = threading.Event()\n"
        "    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(100)]\n"
        "    for t in threads: t.start()\n"
        "    end.set()\n"
        "    for t in threads: t.join()\n"
        "    return 1\n"
    )
    assert run_tests(program, TESTS, LIMITS).reason == "passed"


def test_no_other_process_is_started(isolation):
    for program in (
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.Popen(['sleep', '60'])",
        "import os; os.system('sleep 60')",
        "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    ):
        assert "a program may not start or end a process" in reason(program)
    assert "a program may not start or end a process" in reason("import os; os.kill(os.getppid(), 9)")


@pytest.mark.skipif(network_isolation() != "namespace", reason="the kernel gives no namespaces to this user")
def test_what_slips_through_the_interpreter_dies_with_it(tmp_path):
    # A process of its own session, started past the audit hook.
    program = (
        "import ctypes, time\nlibc = ctypes.CDLL(None)\n"
        "if libc.fork() == 0:\n    libc.setsid()\n    time.sleep(0.5)\n"
        "    libc.execlp(b'touch', b'touch', b'%s', None)\n"
    )
    mark = tmp_path / "alive"
    run_tests(program % str(mark) + RIGHT, TESTS, LIMITS)
    time.sleep(0.8)
    assert not mark.exists()


def test_there_is_no_network(isolation):
    expected = {"namespace": "Network is unreachable", "blocked sockets": "a program has no network"}
    assert expected[isolation] in reason("import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)")


@pytest.mark.parametrize(
    "attempt",
    [
        "open(MINE, 'w')",
        "import os; os.remove(MINE)",
        "import os; os.rename(MINE, 'x')",
        "import os; os.symlink(MINE, 'x'); open('x', 'a')",
        "import os; os.mkdir(os.path.join(os.path.dirname(MINE), 'new'))",
        "import os, shutil; shutil.rmtree(os.path.dirname(MINE))",
    ],
)
def test_a_program_changes_nothing_outside_of_its_folder(tmp_path, attempt):
    mine = tmp_path / "mine"
    mine.write_text("kept")
    assert "its own folder alone" in reason(f"MINE = {str(mine)!r}\n{attempt}")
    assert mine.read_text() == "kept"
    assert os.listdir(tmp_path) == ["mine"]


def test_a_program_does_as_it_likes_in_its_folder(isolation):
    program = (
        "import os, tempfile\n"
        "with tempfile.TemporaryDirectory() as d:\n    os.mkdir(d + '/a'); open(d + '/a/b', 'w').write('x')\n"
        "open(os.devnull, 'w').write('x')\nopen('a', 'w').close()\nos.rename('a', 'b')\nos.remove('b')\n"
    )
    assert run_tests(program + RIGHT, TESTS, LIMITS).passed


def test_files_are_bounded_and_output_is_cut():
    assert "File too large" in reason("open('x', 'wb').write(bytes(2 << 20))")
    verdict = run_tests("print('x' * 100000)\n" + WRONG, TESTS, LIMITS)
    assert len(verdict.output) == sandbox.SHOWN
    assert verdict.output.endswith("AssertionError\n")
    assert not run_tests("while True: print('x' * 1000)", TESTS, LIMITS).passed


def test_the_number_of_files_is_bounded():
    program = "import os\nfor i in range(998): open(str(i), 'w').close()\nos.mkdir('a'); os.symlink('0', 'b')\n"
    assert run_tests(program + RIGHT, TESTS, LIMITS).passed
    for more in ("open('c', 'w')", "os.mkdir('c')", "os.symlink('0', 'c')", "os.link('0', 'c')"):
        assert "a program may write 1000 files, and no more" in reason(f"{program}{more}\n{RIGHT}")


def test_a_program_sees_neither_the_environment_nor_the_standard_input(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    program = "import os\nassert 'SECRET' not in os.environ\nassert os.getcwd() == os.environ['HOME']\n"
    assert run_tests(program + RIGHT, TESTS, LIMITS).passed
    assert reason("input()") == "failed: EOFError: EOF when reading a line"


def test_the_order_of_sets_is_the_same_each_time():
    verdicts = [run_tests("print(list(set('abcdefghij')))", "assert False", LIMITS) for _ in range(3)]
    assert len({verdict.output.partition("\n")[0] for verdict in verdicts}) == 1


def test_without_posix_there_are_no_unit_tests(monkeypatch):
    monkeypatch.setattr(sandbox.os, "name", "nt")
    with pytest.raises(UserError, match="only POSIX systems"):
        run_tests(RIGHT, TESTS)


def test_limits_are_checked():
    with pytest.raises(UserError, match="memory_mb=0: more than 0"):
        Limits(memory_mb=0)
