"""`mdcp launch`: which ranks it runs on; it is run in tests/contracts/test_megatron_training.py."""

import pytest

from megatron_dcp.cli.launch_env import slurm_ranks
from megatron_dcp.cli.main import main
from megatron_dcp.errors import ConfigError

SLURM = {
    "SLURM_PROCID": "17", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NTASKS": "20",
    "SLURM_TASKS_PER_NODE": "8(x2),4", "SLURM_JOB_NODELIST": "gpu[03-04,9]-ib,cpu1",
    "SLURM_JOB_ID": "40007",
}  # fmt: skip


def test_ranks_follow_from_slurms_variables():
    assert slurm_ranks(SLURM) == {
        "RANK": "17", "WORLD_SIZE": "20", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03-ib", "MASTER_PORT": "20007",
    }  # fmt: skip


@pytest.mark.parametrize(("nodes", "first"), [("a1", "a1"), ("a1,b2", "a1"), ("n[1-3]", "n1")])
def test_the_first_host_is_the_rendezvous(nodes, first):
    assert slurm_ranks({**SLURM, "SLURM_JOB_NODELIST": nodes})["MASTER_ADDR"] == first


def test_a_launcher_or_a_single_task_is_left_alone():
    assert slurm_ranks({}) == {}
    assert slurm_ranks({**SLURM, "RANK": "0"}) == {}
    assert slurm_ranks({**SLURM, "SLURM_NTASKS": "1"}) == {}
    given = slurm_ranks({**SLURM, "MASTER_ADDR": "head", "MDCP_PORT": "5000"})
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("head", "5000")


def test_variables_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match="eight"):
        slurm_ranks({**SLURM, "SLURM_TASKS_PER_NODE": "eight"})


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--nproc-per-node", "none", "x.py"], "a number of ranks >= 1"),
        (["--fast", "x.py"], "unknown option '--fast'"),
        (["absent.py"], "is not a file"),
    ],
)
def test_bad_usage_is_named(argv, text, capsys):
    assert main(["launch", *argv]) == 2
    assert text in capsys.readouterr().err
