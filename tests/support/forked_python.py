"""Provides a `python` that forks scripts from a process that has already imported what a run and Ray workers need.

A whole run starts four processes that import torch, Megatron or transformers for ten seconds each; forked processes
start at once. `forked_python()` returns the path of an executable to use in place of `sys.executable`. It asks the
prepared process to fork, passes on arguments, environment, folder, signal mask and open files, and waits for the end.
The forked process is not a child of its caller: tests of signals and of deaths start the real Python.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from support.ranks import fork_context

_SIGKILL_ME_WITH_MY_PARENT = (1, signal.SIGKILL)  # of prctl
_NUM_STREAMS = 3

# The executable, up in 30 ms. Code on the command line and scripts without heavy imports run without a fork.
_CALLER = """#!{python} -IS
import json, os, signal, socket, sys
arguments = sys.argv[1:]
while arguments and arguments[0] in ("-u", "-I", "-S"):
    del arguments[0]
script = os.path.basename(arguments[0]) if arguments else ""
if script == "setup_worker.py":  # Ray's: imports Ray, which takes half a second, to set variables and start the worker
    options = ("--serialized-runtime-env-context=", "--language=")
    [context] = [one.partition("=")[2] for one in arguments if one.startswith(options[0])]
    asked_for = {{name: value for name, value in json.loads(context).items() if value}}
    variables = asked_for.pop("env_vars", {{}})
    if asked_for == {{"py_executable": sys.argv[0]}} and "$" not in context:  # which Ray would replace
        os.environ.update(variables)
        arguments = [one for one in arguments[1:] if not one.startswith(options)]
        script = os.path.basename(arguments[0])
if script in ("monitor.py", "log_monitor.py"):  # of Ray: no cluster grows, and no driver prints workers' output
    signal.pause()
forked = script in ("-m", "default_worker.py", "bare_megatron.py", "nemo_rl_runs.py") or script.startswith("run_")
if not forked:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
umask = os.umask(0)
os.umask(umask)
asked = dict(
    arguments=arguments, environ=dict(os.environ), folder=os.getcwd(), umask=umask,
    blocked=[int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])], python=sys.argv[0],
)
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    message = json.dumps(asked).encode()
    socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(message)
    status = int(server.makefile().read() or 1)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@functools.cache
def forked_python() -> str:
    """Starts the prepared process, once, and returns the path of an executable that has it fork."""
    if torch.cuda.is_available():
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="forked-python-"))
    atexit.register(shutil.rmtree, folder)
    address = str(folder / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    fork_context().Process(target=_serve, args=(listener,), daemon=True).start()
    listener.close()
    executable = folder / "python"
    executable.write_text(_CALLER.format(python=sys.executable, address=address))
    executable.chmod(0o755)
    return str(executable)


@contextmanager
def ray_forks_its_workers() -> Iterator[None]:
    """Makes Ray, if started inside the block, fork its workers from the prepared process."""
    python = sys.executable
    sys.executable = forked_python()
    try:
        yield
    finally:
        sys.executable = python


def _serve(listener: socket.socket) -> None:
    """Forks for each caller, reports the child's exit status, and kills the child if its caller dies first."""
    ctypes.CDLL(None).prctl(*_SIGKILL_ME_WITH_MY_PARENT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    woken, wakes = socket.socketpair()
    for one in (woken, wakes):
        one.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    callers: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    caller, _ = listener.accept()
                    try:
                        asked, streams = _receive(caller)
                    except ValueError:  # the caller died while it was asking
                        caller.close()
                        continue
                    pid = os.fork()
                    if pid == 0:
                        selector.close()
                        for inherited in (listener, woken, wakes, caller, *callers.values()):
                            inherited.close()
                        _run(asked, streams)
                    for stream in streams:
                        os.close(stream)
                    callers[pid] = caller
                    selector.register(caller, selectors.EVENT_READ, pid)
                elif key.fileobj is woken:
                    woken.recv(4096)
                elif key.data in callers:  # a caller never writes again, so it has died
                    os.kill(key.data, signal.SIGKILL)
                    selector.unregister(key.fileobj)
            for pid in list(callers):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    caller = callers.pop(pid)
                    if caller in {key.fileobj for key in selector.get_map().values()}:
                        selector.unregister(caller)
                    with contextlib.suppress(BrokenPipeError):
                        caller.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                    caller.close()


def _receive(caller: socket.socket) -> tuple[dict, list[int]]:
    length, streams, _, _ = socket.recv_fds(caller, 8, _NUM_STREAMS)
    with caller.makefile("rb") as file:
        return json.loads(file.read(int.from_bytes(length, "big"))), streams


def _run(asked: dict, streams: list[int]) -> None:
    """Becomes the requested process; does not return."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(*_SIGKILL_ME_WITH_MY_PARENT)
        os.setpgid(0, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
        os.chdir(asked["folder"])
        os.umask(asked["umask"])
        os.environ.clear()
        os.environ.update(asked["environ"])
        sys.executable = asked["python"]
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        multiprocessing.current_process().name = "MainProcess"
        multiprocessing.current_process()._config["daemon"] = False  # a daemon may not have children
        torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"  # torch reads it when imported
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
        status = _status_of(asked["arguments"])
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  (a forked process must never return)
        traceback.print_exc()
    finally:
        os._exit(status)


def _status_of(arguments: list[str]) -> int:
    """Runs a script or a module as the main one, and returns the exit status that Python would."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        sys.stderr.write(f"{exit_.code}\n")
        return 1
    except BaseException:  # noqa: BLE001  (as Python itself does)
        traceback.print_exc()
        return 1
    return 0
