"""Persistent worker processes for distributed tests: start once, run many cases.

    pool = WorkerPool()
    results = pool.run(4, "tests.distributed.cases:gradients", seed=3)   # one dict per rank

Workers 0..n-1 form a gloo world of n ranks (made anew when n or the backend changes) and call the
function with the keyword arguments; both arguments and results are JSON. The first exception or a
time-out kills all workers and is raised here with the worker's traceback; the next run starts fresh
ones. Nothing is left running after `close`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT_S = 200
# Trainers that hook autograd keep their groups from being freed, and each polls with two threads:
# workers with more than this are replaced.
MOST_THREADS = 200


class WorkerError(Exception):
    """A worker raised, died or did not answer in time; carries its rank and traceback."""


class WorkerPool:
    """Up to `limit` workers, started as they are first needed; python: another interpreter."""

    def __init__(
        self,
        *,
        limit: int = 8,
        timeout_s: float = 150.0,
        fresh_world: bool = False,
        python: str | None = None,
        extra_path: str = "",
    ) -> None:
        self.limit, self.timeout_s, self._extra_path = limit, timeout_s, extra_path
        self._fresh_world = fresh_world
        self.python = python or sys.executable
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._epoch = self._ranks = 0  # each change of the number of ranks makes a new world
        self._store: Any = None
        self._threads = 0  # the most that a worker had when it answered last

    def run(
        self, ranks: int, target: str, *, may_die: Sequence[int] = (), **kwargs: Any
    ) -> list[Any]:
        """Call `module:function` on ranks 0..ranks-1; the results in rank order.

        may_die: ranks that the case kills; their result is None, and all workers end afterwards.
        """
        if not 1 <= ranks <= self.limit:
            raise ValueError(f"{ranks} ranks asked, this pool has at most {self.limit}")
        self._start(ranks)
        if ranks != self._ranks or self._fresh_world:
            self._ranks, self._epoch = ranks, self._epoch + 1
        order = {"ranks": ranks, "epoch": self._epoch, "target": target, "kwargs": kwargs}
        order["leave"] = self._fresh_world  # not at the next run: its threads poll until then
        message = json.dumps(order).encode()
        connections = [c for _, c in self._workers[:ranks]]
        for connection in connections:
            connection.send_bytes(message)
        try:
            return self._collect(connections, may_die)
        except BaseException:
            self.close()
            raise
        finally:
            if may_die or self._threads > MOST_THREADS:
                self.close()

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
                    raise WorkerError(f"rank {rank} died") from None
                if "error" in answer:
                    raise WorkerError(f"rank {rank}: {answer['error']}")
                results[rank] = answer["result"]
                self._threads = max(self._threads, answer["threads"])
        return [results[r] for r in range(len(connections))]

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
        command = [self.python, "-m", "megatron_dcp.testing.pool"]
        command += [str(rank), str(port), str(self._store.port)]
        return subprocess.Popen(command, env=env, cwd=root)

    def close(self) -> None:
        """End every worker that this pool started."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.wait()
        self._workers.clear()
        self._ranks = self._threads = 0


def _leave_world() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()  # groups that only cycles still hold keep their threads otherwise
        dist.destroy_process_group()


def _enter_world(rank: int, ranks: int, store: Any, epoch: int) -> None:
    import torch.distributed as dist

    _leave_world()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"world{epoch}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


def _serve(rank: int, port: int, store_port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection = Client(("127.0.0.1", port))
    connection.send_bytes(str(rank).encode())
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", store_port, timeout=timedelta(seconds=60)
    )
    epoch = 0
    while True:
        try:
            order = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            if order["epoch"] != epoch:
                epoch = order["epoch"]
                _enter_world(rank, order["ranks"], store, epoch)
            module, _, name = order["target"].partition(":")
            result = getattr(importlib.import_module(module), name)(**order["kwargs"])
            if order["leave"]:
                _leave_world()
            answer = {"result": result, "threads": len(os.listdir("/proc/self/task"))}
        except Exception:
            answer = {"error": traceback.format_exc()}
        connection.send_bytes(json.dumps(answer).encode())


def free_port() -> int:
    """A port that was free a moment ago, for tests that start a launcher of their own."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    _serve(*(int(x) for x in sys.argv[1:4]))
