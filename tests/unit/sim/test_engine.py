"""The event loop alone."""

import pytest

from megatron_dcp.errors import PlanError
from megatron_dcp.sim.engine import Graph, Transfer, run
from megatron_dcp.sim.pipeline import stage_order


def test_a_task_waits_for_all_its_lanes_and_dependencies():
    graph = Graph(duration=[3.0, 5.0, 2.0, 1.0], lanes=[[0, 2], [1, 2], [3]])
    graph.depend(3, 2)
    start, end = run(graph)
    assert start == [0, 0, 5, 7]
    assert end == [3, 5, 7, 8]


def test_crossed_orders_are_named_and_not_hung():
    with pytest.raises(PlanError, match="wait for each other") as error:
        run(Graph(duration=[1.0, 1.0], lanes=[[0, 1], [1, 0]]))
    assert error.value.invariant == "order_has_no_cyclic_wait"


def test_three_equal_flows_share_a_link_of_one():
    flows = {t: Transfer(link=0, wire=4.0, hidden=0.0) for t in range(3)}
    graph = Graph(duration=[1.0] * 3, lanes=[[0], [1], [2]], transfers=flows, capacity=[1.0])
    assert run(graph)[1] == pytest.approx([13.0] * 3)


def test_a_hidden_transfer_shows_only_when_the_link_is_shared():
    flows = {t: Transfer(link=0, wire=4.0, hidden=4.0) for t in range(2)}
    one = Graph(duration=[10.0], lanes=[[0]], transfers={0: flows[0]}, capacity=[1.0])
    two = Graph(duration=[10.0] * 2, lanes=[[0], [1]], transfers=flows, capacity=[1.0])
    assert run(one)[1] == [10.0]
    assert run(two)[1] == pytest.approx([14.0, 14.0])


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 1), (4, 8, 1), (4, 2, 1), (4, 8, 2), (2, 6, 3)])
def test_every_stage_runs_each_forward_and_backward_once(p, m, v):
    for stage in range(p):
        ops = stage_order(stage, p, m, v)
        seen = {(o.microbatch, o.chunk, o.backward) for o in ops}
        assert len(ops) == len(seen) == 2 * m * v
        assert all(o.chunk % p == stage for o in ops)
        first = {}
        for k, o in enumerate(ops):
            first[o.microbatch, o.chunk, o.backward] = k
        assert all(first[b, c, False] < first[b, c, True] for b, c, back in seen if back)


def test_interleaving_needs_whole_groups():
    with pytest.raises(PlanError, match="multiple of the stages"):
        stage_order(0, 4, 6, 2)
