"""A watchdog instead of a hang: names the step, slot, placement and the ranks that did not arrive.

Every rank beats before each microbatch and each phase of a step, into the job's store. A thread
watches this rank's own beat. When it is older than the time-out, it reads everybody's, works out
who is behind, prints that on stderr, writes the plan and all Python stacks, leaves a word for the
other ranks' watchdogs and ends the process; they print the same and end too. A rank that is slow
but beats within the time-out is left alone.

Time is `time.monotonic`: a jump of the wall clock changes nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_dcp.dist import DataWorld
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Placement, StepPlan, dumps
from megatron_dcp.runtime.oom import write_budget

_T = TypeVar("_T")

EXIT_STATUS = 70
IDLE = "outside a step"
_BUDGET = "budget "


class Watchdog:
    """One per engine. `beat` from the main thread; the rest happens in its own.

    timeout_s: age of a beat at which this rank counts as stuck. directory: where the plan and the
    stacks are written. end: called with the exit status (tests replace it).
    """

    def __init__(
        self,
        world: DataWorld,
        *,
        timeout_s: float,
        directory: str | Path = ".",
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"watchdog timeout is {timeout_s!r} s; it must be above 0")
        self.world, self.timeout_s, self.directory = world, timeout_s, Path(directory)
        try:  # now, not when the stacks are to be written
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"watchdog_dir {str(directory)!r} cannot be made: {error.strerror}"
            ) from error
        self._end = end
        self._store = None
        if world.size > 1:
            # A connection of our own: while the main thread waits in the store (making a group),
            # its connection is locked, and that is a wait that must be watched too.
            default: Any = dist.distributed_c10d._get_default_store()
            # One prefix per plane: data rank r of each plane has its own beat.
            self._store = dist.distributed_c10d.PrefixStore(
                f"mdcp/watchdog/{world.global_ranks[0]}", default.clone()
            )
        self._plan: StepPlan | None = None
        self._beat: dict[str, Any] = {"phase": IDLE, "step": -1, "calls": 0}
        self._calls = 0  # of the wire when this rank beat last
        self._at = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mdcp-watchdog", daemon=True)
        self._thread.start()

    def beat(
        self, phase: str, plan: StepPlan | None = None, step: int = -1,
        placement: Placement | None = None,
    ) -> None:  # fmt: skip
        """This rank has come to a phase: `agree`, `placement`, `reduce` or IDLE."""
        beat: dict[str, Any] = {"phase": phase, "step": step, "calls": 0}
        if placement is not None:
            beat |= {
                "slot": placement.slot,
                "first_rank": placement.first_rank,
                "degree": placement.degree,
            }
        if plan is not None:
            self._plan = plan
        with self._lock:
            self._beat, self._at, self._calls = beat, time.monotonic(), self.world.wire.calls
            self._tell()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def end_others(self, text: str, *, budget_bytes: int | None = None) -> None:
        """Leave a word for the watchdogs of the other ranks: they print it and end theirs.

        budget_bytes: the budget of a next run, for their hosts (see `oom`). Returns when they had
        the time to read it.
        """
        word = text if budget_bytes is None else f"{_BUDGET}{budget_bytes} {text}"
        self._within(lambda: self._leave_word(word))
        time.sleep(min(2.0, self.timeout_s))

    def _watch(self) -> None:
        pause = min(1.0, self.timeout_s / 4)
        while not self._stop.wait(pause):
            try:
                word = self._within(self._abort_word)
                if word is None:
                    self._within(self._publish)
            except TimeoutError:
                word = self._silence()
            if word is not None:
                self._print(self._budget_of(word))
                self._finish()
                return
            stuck = time.monotonic() - self._at
            if self._beat["phase"] != IDLE and stuck > self.timeout_s:
                self._report(stuck)
                return

    def _within(self, call: Callable[[], _T]) -> _T:
        """Result of a call that uses the store; TimeoutError where it does not answer in time.

        A cut link ends no connection: a request on it waits for ever, and so would the watchdog.
        """
        done: list[_T] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                done.append(call())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, name="mdcp-watchdog-store", daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if failed:
            raise failed[0]
        if not done:
            raise TimeoutError
        return done[0]

    def _silence(self) -> str:
        mine = self._beat
        return (
            f"mdcp watchdog: rank {self.world.rank} has had no answer from the job's store for "
            f"{self.timeout_s:g} s, in step {mine['step']}, {mine['phase']}. The store is on the "
            "host of the rendezvous: that host or the link to it is lost. This rank ends now."
        )

    def _publish(self) -> None:
        """Tell how many messages this rank has begun since its beat: who is behind in a placement
        that all have entered."""
        with self._lock:
            self._beat = {**self._beat, "calls": self.world.wire.calls - self._calls}
            self._tell()

    def _tell(self) -> None:
        if self._store is not None:
            self._store.set(str(self.world.rank), json.dumps(self._beat))

    def _abort_word(self) -> str | None:
        try:
            if self._store is not None and self._store.check(["abort"]):
                return self._store.get("abort").decode()
        except (RuntimeError, dist.DistError):
            # The store lives in rank 0's launcher: when it is gone, so is the job.
            return "the job's store is gone; ending this rank"
        return None

    def _budget_of(self, word: str) -> str:
        """The text of a word; the budget that it carries is left for the next run on this host."""
        if not word.startswith(_BUDGET):
            return word
        budget, _, text = word.removeprefix(_BUDGET).partition(" ")
        write_budget(int(budget), text)
        return text

    def _report(self, stuck: float) -> None:
        try:
            text = self._within(lambda: self.explain(stuck))
            self._print(text)
            self._within(lambda: self._leave_word(text))
        except TimeoutError:
            self._print(self._silence())
        except (RuntimeError, dist.DistError) as error:
            self._print(f"mdcp watchdog: the job's store is gone ({error}); ending this rank")
        self._finish()

    def _leave_word(self, text: str) -> None:
        if self._store is not None:
            self._store.set("abort", text)

    def explain(self, stuck: float) -> str:
        """What this rank waits for, and which ranks did not arrive."""
        mine = self._beat
        where = f"step {mine.get('step')}, {mine['phase']}"
        peers = range(self.world.size)
        if "slot" in mine:
            last = mine["first_rank"] + mine["degree"] - 1
            where = (
                f"step {mine['step']}, slot {mine['slot']}, placement on data ranks "
                f"{mine['first_rank']}..{last}"
            )
            peers = range(mine["first_rank"], last + 1)
        beats = {r: self._beat_of(r) for r in peers if r != self.world.rank}
        beats[self.world.rank] = mine
        furthest = max(_order(b) for b in beats.values())
        behind = {r: b for r, b in sorted(beats.items()) if _order(b) < furthest}
        missing = "; ".join(f"rank {r} is at {_place(b)}" for r, b in behind.items()) or (
            "all ranks are at the same message: the transport, or work on all of them, is stuck"
        )
        return (
            f"mdcp watchdog: rank {self.world.rank} has waited {stuck:.1f} s (limit "
            f"{self.timeout_s:g} s) in {where}. Did not arrive: {missing}. The plan and the "
            f"stacks are in {self.directory}/watchdog-rank*; all ranks end now."
        )

    def _beat_of(self, rank: int) -> dict[str, Any]:
        store = self._store
        if store is None or not store.check([str(rank)]):
            return {"phase": "never seen", "step": -1, "calls": 0}
        beat: dict[str, Any] = json.loads(store.get(str(rank)))
        return beat

    def _print(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _finish(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            base = self.directory / f"watchdog-rank{self.world.rank}"
            if self._plan is not None:
                base.with_suffix(".plan.json").write_text(dumps(self._plan) + "\n")
            with base.with_suffix(".stacks.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            self._print(f"mdcp watchdog: could not write plan and stacks: {error}")
        time.sleep(min(2.0, self.timeout_s))  # let the other ranks read the word
        self._end(EXIT_STATUS)


_PHASES = {"never seen": -1, IDLE: 0, "agree": 1, "placement": 2, "reduce": 3}


def _order(beat: dict[str, Any]) -> tuple[int, ...]:
    """Progress of a beat: IDLE after step k comes before `agree` of step k + 1."""
    step = beat["step"] + (1 if beat["phase"] == IDLE else 0)
    place = (beat.get("slot", 0), beat.get("first_rank", 0))
    return (step, _PHASES[beat["phase"]], *place, beat["calls"])


def _place(beat: dict[str, Any]) -> str:
    if "slot" in beat:
        return (
            f"step {beat['step']}, slot {beat['slot']}, block from rank {beat['first_rank']}, "
            f"after {beat['calls']} messages"
        )
    return f"step {beat['step']}, {beat['phase']}"
