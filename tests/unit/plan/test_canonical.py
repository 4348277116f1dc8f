"""The wire form: bytes, digest, strict reading."""

import hashlib
import json

import pytest

from megatron_dcp.errors import PlanError
from megatron_dcp.plan import (
    CostRef,
    Placement,
    StepPlan,
    Topology,
    Workload,
    canonical_bytes,
    diff,
    digest,
    dumps,
    load,
    loads,
)  # fmt: skip


def small_plan(**changes):
    fields = {
        "strategy": "dcp",
        "algorithm": "wide-first",
        "topology": Topology(data_ranks=4, ranks_per_node=4),
        "lockstep": 1,
        "cost": CostRef(name="unit", digest="0123456789abcdef"),
        "budget_bytes": 1000,
        "layers": 2,
        "workload": Workload(lengths=(5, 900, 7)),
        "placements": (
            Placement(slot=1, first_rank=1, degree=1, samples=(0,), time_us=5, bytes=10),
            Placement(slot=0, first_rank=0, degree=4, samples=(1,), scheme="ulysses",
                      inner_degree=4, time_us=300, bytes=900),
            Placement(slot=1, first_rank=0, degree=1, samples=(2,), time_us=7, bytes=14),
        ),
        "makespan_us": 307,
        "lower_bound_us": 300,
        "info": {"planner_us": 12},
    }  # fmt: skip
    return StepPlan(**{**fields, **changes})


def test_canonical_bytes_are_the_object_without_digest_and_info():
    plan = small_plan()
    obj = json.loads(dumps(plan))
    stated = obj.pop("digest")
    del obj["info"]
    text = json.dumps(obj, sort_keys=True, separators=(",", ":")).encode()
    assert canonical_bytes(plan) == text
    assert stated == hashlib.sha256(text).hexdigest()[:16] == digest(plan)


def test_placements_are_written_in_canonical_order():
    placements = json.loads(dumps(small_plan()))["placements"]
    keys = [(p["slot"], p["first_rank"], -p["degree"]) for p in placements]
    assert keys == sorted(keys)


def test_info_does_not_change_the_digest():
    assert digest(small_plan()) == digest(small_plan(info={"planner_us": 99, "host": "b"}))


def test_round_trip(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(dumps(small_plan()))
    assert load(path) == small_plan()


@pytest.mark.parametrize("key", ["step", "topology", "placements", "cost", "shapes"])
def test_a_missing_key_is_refused(key):
    obj = json.loads(dumps(small_plan()))
    del obj[key]
    with pytest.raises(PlanError, match=key):
        loads(json.dumps(obj))


@pytest.mark.parametrize("where", [(), ("topology",), ("cost",), ("placements", 0)])
def test_an_unknown_key_is_refused_outside_info(where):
    obj = json.loads(dumps(small_plan()))
    target = obj
    for step in where:
        target = target[step]
    target["surprise"] = 1
    with pytest.raises(PlanError, match="surprise"):
        loads(json.dumps(obj))
    obj = json.loads(dumps(small_plan()))
    obj["info"]["surprise"] = 1
    assert loads(json.dumps(obj)).info["surprise"] == 1


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("makespan_us",), 1.0),
        (("placements", 0, "time_us"), 3.5),
        (("placements", 0, "fused"), 0),
        (("lengths", 1), "900"),
        (("topology", "data_ranks"), True),
        (("placements", 0, "samples", 0), 1.0),
        (("lower_bound_us",), -1),
        (("placements", 0, "bytes"), -1),
        (("placements", 0, "degree"), 10**30),
        (("lengths", 1), 2**63),
        (("topology", "speed"), [True, True, True, True]),
        (("topology", "speed"), [2**80, 1000, 1000, 1000]),
        (("info",), 5),
        (("info",), [1, 2]),
        (("strategy",), "\ud800"),
        (("cost", "name"), "\ud800"),
    ],
)
def test_only_values_of_the_right_type_are_read(path, value):
    obj = json.loads(dumps(small_plan()))
    target = obj
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    del obj["digest"]  # which no such value matches
    with pytest.raises(PlanError):
        loads(json.dumps(obj))


def test_every_single_bit_flip_is_an_error_or_the_same_plan():
    data = bytearray(dumps(small_plan()).encode())
    for i in range(len(data)):
        for bit in range(8):
            data[i] ^= 1 << bit
            try:
                plan = loads(bytes(data))
            except PlanError:
                pass
            else:
                assert canonical_bytes(plan) == canonical_bytes(small_plan())
            data[i] ^= 1 << bit


def test_unreadable_files_are_plan_errors(tmp_path):
    with pytest.raises(PlanError, match="cannot read"):
        load(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(PlanError, match=r"broken\.json"):
        load(tmp_path / "broken.json")


def test_diff_names_the_field():
    other = small_plan(placements=[*small_plan().placements[:-1],
                                   Placement(slot=1, first_rank=1, degree=1, samples=(0,),
                                             time_us=6, bytes=10)])  # fmt: skip
    assert diff(small_plan(), other) == ["placements[2].time_us: 5 != 6"]
    assert diff(small_plan(), small_plan()) == []
