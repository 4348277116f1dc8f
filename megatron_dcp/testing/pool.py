"""Worker processes for distributed tests: start once, run many cases.

    pool = WorkerPool()
    results = pool.run(4, "tests.distributed.cases:gradients", seed=3)   # one dict per rank

Workers 0..n-1 form a gloo world of n ranks (made anew when n or the backend changes) and call the
function with the keyword arguments; both arguments and results are JSON. The first exception or a
time-out kills all workers and is raised here with the worker's traceback; the next run starts fresh
ones. Nothing is left running after `close`.

With `fork` every run has processes and a world of its own, forked from workers that hold nothing
but imports: what a trainer leaves behind (groups that its autograd hooks keep alive, each with
threads that poll) ends with the run, and no group is torn down in a process that goes on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT_S = 200


class WorkerError(Exception):
    """A worker raised, died or did not answer in time; carries its rank and traceback."""


class WorkerPool:
    """Up to `limit` workers, started as they are first needed.

    fork: a process of its own for every run of every rank. preload: "module:function" that a worker
    calls once, before its first run, to import what all runs need. python: another interpreter.
    """

    def __init__(
        self,
        *,
        limit: int = 8,
        timeout_s: float = 150.0,
        fork: bool = False,
        preload: str = "",
        python: str | None = None,
        extra_path: str = "",
    ) -> None:
        self.limit, self.timeout_s, self._extra_path = limit, timeout_s, extra_path
        self._fork, self._preload = fork, preload
        self.python = python or sys.executable
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._epoch = self._ranks = 0  # each change of the number of ranks makes a new world
        self._store: Any = None

    def run(
        self, ranks: int, target: str, *, may_die: Sequence[int] = (), **kwargs: Any
    ) -> list[Any]:
        """Call `module:function` on ranks 0..ranks-1; the results in rank order.

        may_die: ranks that the case kills; their result is None, and all workers end afterwards.
        """
        if not 1 <= ranks <= self.limit:
            raise ValueError(f"{ranks} ranks asked, this pool has at most {self.limit}")
        self._start(ranks)
        if ranks != self._ranks or self._fork:
            self._ranks, self._epoch = ranks, self._epoch + 1
        order = {"ranks": ranks, "epoch": self._epoch, "target": target, "kwargs": kwargs}
        message = json.dumps(order).encode()
        connections = [c for _, c in self._workers[:ranks]]
        for connection in connections:
            connection.send_bytes(message)
        try:
            results = self._collect(connections, may_die)
        except BaseException:
            self.close()
            raise
        if may_die:
            self.close()
        elif self._fork:  # not before: a rank that ends takes from its peers what they wait for
            for connection in connections:
                connection.send_bytes(b"end")
        return results

    def _collect(self, connections: list[Connection], may_die: Sequence[int]) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(results) < len(connections):
            waiting = [c for r, c in enumerate(connections) if r not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [r for r in range(len(connections)) if r not in results]
                raise WorkerError(f"ranks {late} did not answer within {self.timeout_s} s")
            for connection in ready:
                rank = connections.index(connection)  # type: ignore[arg-type]
                try:
                    answer = json.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    if rank in may_die:
                        results[rank] = None
                        continue
                    raise WorkerError(self._deaths(5.0) or f"rank {rank} died") from None
                if "error" in answer:  # a peer's death, perhaps: then that is what to tell
                    told = self._deaths(1.0)
                    raise WorkerError(told or f"rank {rank}: {answer['error']}")
                results[rank] = answer["result"]
        return [results[r] for r in range(len(connections))]

    def _deaths(self, within_s: float) -> str:
        """Which workers died of what, as soon as one has; "" if none does in that time."""
        deadline = time.monotonic() + within_s
        while True:
            codes = {r: process.poll() for r, (process, _) in enumerate(self._workers)}
            dead = {r: code for r, code in codes.items() if code is not None}
            if dead or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return ", ".join(
            f"rank {r} died of {signal.Signals(-code).name}"
            if code < 0
            else f"rank {r} ended with exit code {code}"
            for r, code in dead.items()
        )

    def _start(self, ranks: int) -> None:
        if self._store is None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            self._store = TCPStore(
                "127.0.0.1",
                0,
                is_master=True,
                timeout=timedelta(seconds=60),
                wait_for_workers=False,
            )
        missing = range(len(self._workers), ranks)
        if not missing:
            return
        with Listener(("127.0.0.1", 0)) as listener:
            processes = {r: self._spawn(r, listener.address[1]) for r in missing}
            connections: dict[int, Connection] = {}
            for _ in missing:
                connection = listener.accept()
                connections[int(connection.recv_bytes())] = connection
        self._workers += [(processes[r], connections[r]) for r in missing]

    def _spawn(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        root = Path(__file__).parents[2]
        path = os.pathsep.join([str(root), self._extra_path, os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        settings = {
            "rank": rank, "port": port, "store_port": self._store.port,
            "fork": self._fork, "preload": self._preload,
        }  # fmt: skip
        command = [self.python, "-m", "megatron_dcp.testing.pool", json.dumps(settings)]
        return subprocess.Popen(command, env=env, cwd=root, start_new_session=True)

    def close(self) -> None:
        """End every worker that this pool started."""
        for process, connection in self._workers:
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its runs, too
        for process, _ in self._workers:
            process.wait()
        self._workers.clear()
        self._ranks = 0


def _enter_world(rank: int, ranks: int, store_port: int, epoch: int) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()  # groups that only cycles still hold keep their threads otherwise
        dist.destroy_process_group()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", store_port, timeout=timedelta(seconds=60)
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"world{epoch}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


def _call(target: str, **kwargs: Any) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(**kwargs)


def _run_forked(run: Callable[[], None], connection: Connection) -> None:
    """Run in a child that stays until the pool has heard all ranks; die as it dies."""
    tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1:
        raise RuntimeError(f"{tasks} threads before a fork: the preload may import, not start any")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            with contextlib.suppress(EOFError):  # the pool was closed
                connection.recv_bytes()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    if code:
        os._exit(code)


def _serve(*, rank: int, port: int, store_port: int, fork: bool, preload: str) -> None:
    import torch

    torch.set_num_threads(1)
    connection = Client(("127.0.0.1", port))
    connection.send_bytes(str(rank).encode())
    epoch = 0

    def run(order: dict[str, Any]) -> None:
        nonlocal epoch
        try:
            if order["epoch"] != epoch:
                epoch = order["epoch"]
                _enter_world(rank, order["ranks"], store_port, epoch)
            answer = {"result": _call(order["target"], **order["kwargs"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        connection.send_bytes(json.dumps(answer).encode())

    if preload:
        _call(preload)
    while True:
        try:
            order = json.loads(connection.recv_bytes())
        except EOFError:
            return
        if fork:
            _run_forked(partial(run, order), connection)
        else:
            run(order)


def free_port() -> int:
    """A port that was free a moment ago, for tests that start a launcher of their own."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))
