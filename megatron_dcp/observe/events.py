"""Events: what each rank measured, as JSON lines; one file per rank, `events-rank<R>.jsonl`.

An event is one object with integer times in us on a clock that all ranks of one host share
(`time.monotonic_ns`):

    {"rank", "step", "kind", "start_us", "end_us"} and, where they apply,
    {"slot", "first_rank", "degree", "scheme", "recompute", "tokens", "strategy", "bytes"}

Kinds: `step` (the whole step of a rank; `groups`: how many it is in; `bytes`: the most it held, by
the allocator on a GPU, else of the resident set), `placement` (forward + backward of a microbatch),
`comm` (a collective, nested in its placement), `wait` (waiting for the ranks of a block or of the
step), `reduce` (gradient reduction), `optimizer`, `plan` (planning; `exposed_us`: how long the step
had to wait for plan and data), `data` (reading and exchange).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from megatron_dcp.errors import ConfigError

KINDS = ("step", "placement", "comm", "wait", "reduce", "optimizer", "plan", "data")
Event = Mapping[str, Any]


class EventWriter:
    """Appends events of one rank to `<run>/events-rank<R>.jsonl`; one line per event."""

    def __init__(self, run: Path, rank: int) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self.path = run / f"events-rank{rank}.jsonl"
        self._file: TextIO = self.path.open("w", encoding="utf-8")

    def write(self, events: Iterable[Event], **extra: Any) -> None:
        """Write events; `extra` keys (e.g. strategy) are added to each."""
        for event in events:
            self._file.write(json.dumps({**event, **extra}, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def step_window(events: Iterable[Event]) -> tuple[int, int]:
    """First start and last end, us, of the step itself. Plans and data are made ahead, so events of
    kind `plan` and `data` may lie long before it and do not count."""
    inside = [e for e in events if e["kind"] not in ("plan", "data")]
    if not inside:
        raise ConfigError("no event of a running step among those given")
    steps = [e for e in inside if e["kind"] == "step"] or inside
    return min(e["start_us"] for e in steps), max(e["end_us"] for e in steps)


def read_events(run: str | Path) -> list[dict[str, Any]]:
    """All events of a run directory, ordered by rank and then as written."""
    return [event for path in _event_files(Path(run)) for event in _read_lines(path)]


def _event_files(run: Path) -> list[Path]:
    files = sorted(run.glob("events-rank*.jsonl"), key=lambda p: int(p.stem.rpartition("rank")[2]))
    if not files:
        raise ConfigError(f"no events-rank*.jsonl in {run}: is it a directory that a run wrote?")
    return files


_ALWAYS = ("rank", "step", "start_us", "end_us")
_OF_PLACEMENTS = (*_ALWAYS, "slot", "first_rank", "degree", "tokens")


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """A last line without its end was cut by whatever ended the run, and counts for nothing."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            event = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not a JSON event: {error}") from error
        if not isinstance(event, dict) or event.get("kind") not in KINDS:
            raise ConfigError(f"{path}:{number}: not an event of kind {', '.join(KINDS)}")
        needed = _OF_PLACEMENTS if event["kind"] == "placement" else _ALWAYS
        wrong = [key for key in needed if not isinstance(event.get(key), int)]
        if wrong or not event["start_us"] <= event["end_us"]:
            what = f"no integer {wrong[0]!r}" if wrong else "it ends before it starts"
            raise ConfigError(f"{path}:{number}: event of kind {event['kind']}: {what}")
        yield event
