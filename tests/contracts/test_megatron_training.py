"""`megatron.training.pretrain` of the 0.19.2 wheel, driven by examples/megatron_gpt/pretrain.py.

Each case trains the same script twice in the same workers: as it is (padded rows, Megatron's own
attention) and through `mdcp launch` with --mdcp. Losses are those that Megatron logs.
"""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from megatron_dcp.testing.pool import WorkerPool, free_port
from tests.contracts.megatron_env import ROOT, own_python

pytestmark = pytest.mark.distributed

EXAMPLE = ROOT / "examples" / "megatron_gpt"
EXTERNAL = Path(__file__).with_name("megatron_external.py")
STEPS = 20
MIX = ["--mdcp", "--mdcp-strategy", "test-mix"]
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--expert-model-parallel-size", "2",
           "--moe-aux-loss-coeff", "0", "--moe-token-dispatcher-type", "alltoall"]  # fmt: skip
GLOBAL = [*EXPERTS, "--moe-aux-loss-coeff", "0.1",
          "--moe-router-load-balancing-type", "global_aux_loss"]  # fmt: skip
TWO_STAGES = ["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "1"]


def arguments(*more: str, **changed: str) -> list[str]:
    """The example's flags, smaller, with some values changed."""
    found = (EXAMPLE / "tiny.args").read_text().split()
    values = {"seq_length": "64", "max_position_embeddings": "64", "global_batch_size": "8",
              "hidden_size": "32", "train_iters": str(STEPS), **changed}  # fmt: skip
    for name, value in values.items():
        found[found.index("--" + name.replace("_", "-")) + 1] = value
    return [*found, *more]


def run(
    pool: WorkerPool, ranks: int, argv: list[str], script: Path = EXAMPLE / "pretrain.py",
    **more: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    case = "tests.contracts.megatron_training_cases:run"
    return pool.run(ranks, case, script=str(script), argv=argv, **more)


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, [], id="dp2"),
        pytest.param(2, OVERLAP, id="distributed-optimizer-overlap"),
        # Four ranks that import all of Megatron take minutes to meet on two cores: nightly. These
        # layouts run on megatron-core alone in test_megatron_core.py.
        pytest.param(
            4, ["--pipeline-model-parallel-size", "2"], id="pp2-dp2", marks=pytest.mark.nightly
        ),
        pytest.param(
            4, ["--tensor-model-parallel-size", "2"], id="tp2-dp2", marks=pytest.mark.nightly
        ),
        pytest.param(2, EXPERTS, id="moe-ep2", marks=pytest.mark.nightly),
        pytest.param(
            2,
            ["--recompute-granularity", "full", "--recompute-method", "uniform",
             "--recompute-num-layers", "1"],
            id="recompute-full",
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_pretrain_planned_equals_static(
    own_megatron_pool: WorkerPool, ranks: int, flags: list[str]
) -> None:
    evaluation = ["--eval-iters", "2"] if not flags else []
    argv = arguments(*flags, *evaluation)
    static = run(own_megatron_pool, ranks, argv)[-1]
    planned = run(own_megatron_pool, ranks, [*argv, *MIX])[-1]
    assert len(static["losses"]) == len(planned["losses"]) == STEPS
    assert relative(static["losses"], planned["losses"]) <= 2e-6
    assert relative(static["norms"], planned["norms"]) <= 1e-4
    assert len(set(planned["digests"])) == STEPS
    assert static["digests"] == []
    assert relative(static["evaluations"] or [1.0], planned["evaluations"] or [1.0]) <= 2e-6


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["cyclic", "external"])
def test_other_data_loaders(own_megatron_pool: WorkerPool, kind: str) -> None:
    """Random order from the seed, and loaders that the script makes itself; with evaluation."""
    script = EXTERNAL if kind == "external" else EXAMPLE / "pretrain.py"
    argv = arguments("--dataloader-type", kind, "--eval-iters", "2")
    static = run(own_megatron_pool, 2, argv, script)[-1]
    planned = run(own_megatron_pool, 2, [*argv, *MIX], script)[-1]
    assert len(static["losses"]) == len(planned["losses"]) == STEPS
    assert relative(static["losses"], planned["losses"]) <= 2e-6
    assert relative(static["norms"], planned["norms"]) <= 1e-4
    assert static["evaluations"]
    assert relative(static["evaluations"], planned["evaluations"]) <= 2e-6


@pytest.mark.nightly
def test_ranks_of_a_static_context_parallelism_become_data_ranks(
    own_megatron_pool: WorkerPool,
) -> None:
    """The flag of a job stays as it is. Plain Megatron needs TE for it: its run is without."""
    static = run(own_megatron_pool, 2, arguments())[-1]
    planned = run(own_megatron_pool, 2, arguments("--context-parallel-size", "2", *MIX))[-1]
    assert relative(static["losses"], planned["losses"]) <= 2e-6
    assert relative(static["norms"], planned["norms"]) <= 1e-4


class _Probe(enum.Enum):
    X = 1


@pytest.mark.skipif(
    _Probe.X.__reduce_ex__(2)[0] is getattr,
    reason="this Python (3.11.2 does) pickles enums as calls of getattr, which torch.load refuses: "
    "Megatron cannot read its own checkpoints of format torch",
)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(GLOBAL, id="experts"),
        pytest.param([*GLOBAL, *TWO_STAGES], id="experts-pp2", marks=pytest.mark.nightly),
    ],
)
def test_resume_gives_the_same_plans_and_losses(
    own_megatron_pool: WorkerPool, tmp_path: Path, flags: list[str]
) -> None:
    """The experts' loss needs the frequencies of the step before the checkpoint."""
    folder = ["--save", str(tmp_path), "--ckpt-format", "torch", "--save-interval", "3"]
    same = [*MIX, *flags, "--lr-decay-iters", "20"]
    whole = run(own_megatron_pool, 2, arguments(*same, train_iters="6"))
    run(own_megatron_pool, 2, arguments(*same, *folder, train_iters="3"))
    load = ["--load", str(tmp_path), "--override-opt_param-scheduler"]
    rest = run(own_megatron_pool, 2, arguments(*same, *folder, *load, train_iters="6"))
    for before, after in zip(whole, rest, strict=True):
        assert before["digests"][3:] == after["digests"]
        if before["losses"][0] is not None:  # the last stage has them
            assert relative(before["losses"][3:], after["losses"]) <= 2e-6
        assert relative(before["norms"][3:], after["norms"]) <= 1e-4


def test_out_of_memory_leaves_a_smaller_budget_for_the_next_start(
    own_megatron_pool: WorkerPool, tmp_path: Path
) -> None:
    """All ranks fail with the numbers; the next start plans with nine tenths of what failed."""
    full = ["--mdcp-forward-step", "tests.contracts.megatron_training_cases:out_of_memory"]
    files = {"oom_file": str(tmp_path / "oom.json")}
    for r in run(own_megatron_pool, 2, arguments("--mdcp", *full, train_iters="2"), **files):
        assert r["error"].startswith("OutOfMemoryError: rank")
        assert "The plan expected" in r["error"]
    left = json.loads((tmp_path / "oom.json").read_text())["budget_bytes"]
    again = run(own_megatron_pool, 2, arguments("--mdcp", train_iters="2"), **files)
    assert [r["budget"] for r in again] == [left, left]
    assert len(again[0]["losses"]) == 2


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--hidden-dropout", "0.1"], "--hidden-dropout 0.1"),
        (["--mdcp-strategy", "nonesuch"], "unknown strategy 'nonesuch'"),
        (["--mdcp-memory-gb", "0.000001"], "bytes"),
        (["--mtp-num-layers", "1"], "--mtp-num-layers"),
        (["--yaml-cfg", "arguments.yaml"], "--mdcp with --yaml-cfg arguments.yaml"),
    ],
)
def test_wrong_flags_are_refused_on_every_rank(
    own_megatron_pool: WorkerPool, flags: list[str], text: str
) -> None:
    for result in run(own_megatron_pool, 2, arguments("--mdcp", *flags, train_iters="1")):
        assert text in result["error"]
        assert result["losses"] == []


def test_a_version_outside_the_table_is_refused_on_every_rank(
    own_megatron_pool: WorkerPool,
) -> None:
    for result in run(own_megatron_pool, 2, arguments("--mdcp", train_iters="1"), version="0.12.1"):
        assert "Megatron-Core 0.12.1 is installed, tested are 0.16" in result["error"]
        assert result["losses"] == []


def launch(python: str, script: Path, argv: list[str], ranks: int) -> list[tuple[int, str]]:
    """Exit status and output of each rank of a real `mdcp launch`."""
    port, processes = str(free_port()), []
    for rank in range(ranks):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            # What a source tree imports besides (0.16: `six`) may be given on PYTHONPATH.
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        command = [python, "-m", "megatron_dcp", "launch", "--allow-cpu", str(script), *argv]
        processes.append(
            subprocess.Popen(
                command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    out = []
    try:
        for process in processes:
            text, _ = process.communicate(timeout=250)
            out.append((process.returncode, text))
    finally:
        for process in processes:
            process.kill()
    return out


def test_both_planners_together_are_refused_with_both_names() -> None:
    argv = arguments("--mdcp", "--hybrid-context-parallel")
    for status, text in launch(own_python(), EXAMPLE / "pretrain.py", argv, 2):
        assert status == 1
        assert "--mdcp and --hybrid-context-parallel are both on" in text


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "data-parallel rank 1: the data iterator gives items without lengths"),
        pytest.param(["--mdcp-memory-gb", "0.000001"], "bytes", marks=pytest.mark.nightly),
        pytest.param(["--mdcp-strategy", "nonesuch"], "nonesuch", marks=pytest.mark.nightly),
    ],
    ids=["data of one rank", "no memory", "flag"],
)
def test_launch_ends_with_1_on_every_rank_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], text: str
) -> None:
    """Found by one rank alone, by the planner and by the argument check."""
    if not flags:
        monkeypatch.setenv("SPOILED_RANK", "1")
    argv = arguments("--mdcp", "--dataloader-type", "external", *flags)
    for status, out in launch(own_python(), EXTERNAL, argv, 2):
        assert status == 1
        assert text in out
        assert "lm loss:" not in out


def test_launch_says_what_it_looked_for_without_megatron_training() -> None:
    # The ordinary environment has 0.16.1, whose wheel holds megatron.core only.
    (status, text), *_ = launch(sys.executable, EXAMPLE / "pretrain.py", arguments("--mdcp"), 1)
    assert status == 1
    assert "looked for megatron.training.arguments:add_megatron_arguments" in text


def test_launch_starts_its_own_ranks(tmp_path: Path) -> None:
    text = "import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:], flush=True)\n"
    (tmp_path / "job.py").write_text(text)
    done = subprocess.run(
        [own_python(), "-m", "megatron_dcp", "launch", "--nproc-per-node", "2", "--allow-cpu",
         "job.py", "--flag"],
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(done.stdout.splitlines()) == [f"rank {r} ['--flag']" for r in range(2)]


def build_helpers(root: Path) -> None:
    """The index builder that Megatron compiles at its start, for the interpreter of the test.

    Its Makefile asks whichever python3 comes first in PATH.
    """
    source = root / "megatron" / "core" / "datasets" / "helpers.cpp"
    target = source.with_name("helpers_cpp" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not target.exists():
        includes = subprocess.check_output([sys.executable, "-m", "pybind11", "--includes"])
        flags = ["-O3", "-shared", "-std=c++17", "-fPIC", *includes.decode().split()]
        subprocess.run(["g++", *flags, str(source), "-o", str(target)], check=True)


TREE = Path(os.environ.get("MEGATRON_LM_DIR", "/"))


def _has_flag(flag: str) -> bool:
    """Whether the tree's own argument parser names a flag."""
    parser = TREE / "megatron" / "training" / "arguments.py"
    return parser.is_file() and flag in parser.read_text()


def logged_losses(argv: list[str]) -> list[float]:
    """Losses that the tree's unmodified pretrain_gpt.py logs on two ranks."""
    build_helpers(TREE)
    ends = launch(own_python(), TREE / "pretrain_gpt.py", argv, 2)
    assert [status for status, _ in ends] == [0, 0], ends[-1][1][-3000:]
    lines = [x for x in ends[-1][1].splitlines() if " iteration " in x and "lm loss:" in x]
    return [float(x.split("lm loss:")[1].split()[0]) for x in lines]


@pytest.mark.skipif(
    "MEGATRON_LM_DIR" not in os.environ, reason="MEGATRON_LM_DIR names no Megatron-LM checkout"
)
def test_unmodified_pretrain_gpt_of_a_checkout() -> None:
    argv = arguments(
        "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "95",
        "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss",
    )  # fmt: skip
    static, planned = (logged_losses([*argv, *more]) for more in ([], ["--mdcp"]))
    assert len(static) == STEPS
    assert relative(static, planned) <= 2e-6


@pytest.mark.skipif(
    not _has_flag("--sft-mock-dataset-config-json"),
    reason="MEGATRON_LM_DIR names no tree with mock data of varying length (the branch dev has it)",
)
@pytest.mark.parametrize("kind", ["sft", "use-varlen-dataset"])
def test_mock_data_of_varying_length_of_a_checkout(kind: str) -> None:
    """Static: padded rows (`sbhd`), since Megatron has no packed attention on a CPU."""
    lengths = {"mode": "distribution", "type": "lognormal", "min_seq_len": 4, "max_seq_len": 60,
               "mean_seq_len": 20, "lognormal_sigma": 0.9}  # fmt: skip
    argv = arguments(
        "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "95",
        "--null-tokenizer-pad-id", "93",
        eval_iters="1",  # these data sets may not be empty, and evaluation sizes them
    )  # fmt: skip
    padded = ["--sft", "--sft-mock-dataset-config-json", json.dumps({**lengths, "format": "sbhd"})]
    name = "sft" if kind == "sft" else "varlen"
    packed = [f"--{kind}", f"--{name}-mock-dataset-config-json", json.dumps(lengths)]
    static, planned = logged_losses([*argv, *padded]), logged_losses([*argv, *packed, "--mdcp"])
    assert len(static) == STEPS
    assert relative(static, planned) <= 2e-6
