"""Events are written and read back; shares add up on a step worked out by hand."""

import json

import pytest

from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.events import EventWriter, read_events
from megatron_dcp.observe.shares import step_shares


def event(rank, kind, start, end, **more):
    return {"rank": rank, "step": 0, "kind": kind, "start_us": start, "end_us": end, **more}


STEP = [
    event(0, "step", 0, 1000),
    event(0, "placement", 0, 600, slot=0, first_rank=0, degree=2, tokens=100),
    event(0, "comm", 100, 200),
    event(0, "wait", 600, 900),
    event(0, "reduce", 900, 1000),
    event(1, "step", 50, 1000),
    event(1, "placement", 50, 850, slot=0, first_rank=0, degree=2, tokens=100),
    event(1, "wait", 850, 900),
    event(1, "reduce", 900, 1000),
]


def test_shares_by_hand():
    shares = step_shares(STEP)[0]
    assert shares.step_s == pytest.approx(1e-3)
    assert shares.idle == pytest.approx((300 + 50 + 50) / 2000)
    assert shares.comm == pytest.approx((100 + 100 + 100) / 2000)
    assert shares.tokens == 100


def test_round_trip(tmp_path):
    for rank in (0, 1):
        writer = EventWriter(tmp_path, rank)
        writer.write([e for e in STEP if e["rank"] == rank], strategy="dcp")
        writer.close()
    assert read_events(tmp_path) == [{**e, "strategy": "dcp"} for e in STEP]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"kind": ', "not a JSON event"),
        ("[]", "not an event of kind step"),
        ('{"kind": "lunch"}', "not an event of kind step"),
        ('{"kind": "step", "rank": 0}', "no integer 'step'"),
        (json.dumps(event(0, "wait", 0, "late")), "no integer 'end_us'"),
        (json.dumps(event(0, "wait", 9, 3)), "ends before it starts"),
        (json.dumps(event(0, "placement", 0, 600, first_rank=0, degree=2)), "no integer 'slot'"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, text):
    whole = json.dumps(STEP[0])
    (tmp_path / "events-rank0.jsonl").write_text(f"{whole}\n{line}\n")
    with pytest.raises(ConfigError, match=rf"events-rank0\.jsonl:2: .*{text}"):
        read_events(tmp_path)


def test_a_last_line_that_the_end_of_the_run_cut_counts_for_nothing(tmp_path):
    (tmp_path / "events-rank0.jsonl").write_text(f'{json.dumps(STEP[0])}\n{{"kind": "pla')
    assert read_events(tmp_path) == [STEP[0]]


def test_a_folder_without_events_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no events"):
        read_events(tmp_path)
