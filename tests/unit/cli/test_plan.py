"""`mdcp plan`: the headline plan, output forms, and every kind of bad input."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_dcp.cli.main import main
from megatron_dcp.cost import resolve
from megatron_dcp.plan import canonical_bytes, check_plan, load, loads

LENGTHS = Path(__file__).parents[2] / "data" / "lengths"
WIKI = ["--lengths", str(LENGTHS / "wiki_512.txt"), "--ranks", "64", "--ranks-per-node", "8"]


def test_headline_plan_from_another_folder_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"  # any import of torch fails
        "from megatron_dcp.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "plan", *WIKI, "--cost", "a100-gpt7b", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    plan = check_plan(loads(run.stdout), resolve("a100-gpt7b").head_limits)
    assert len(plan.lengths) == 512
    assert plan.makespan_us <= 1_640_000
    assert abs(plan.lower_bound_us - 1_560_000) <= 1_000
    assert plan.makespan_us >= plan.lower_bound_us


def test_table_files_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figure = tmp_path / "plan.json", tmp_path / "plan.png"
    options = ["plan", *WIKI, "--samples", "64", "--ranks", "8", "--strategy", "static"]
    assert main([*options, "--out", str(out), "--figure", str(figure)]) == 0
    text = capsys.readouterr().out
    plan = load(out)
    assert plan.strategy == "static"
    assert f"makespan {plan.makespan_us / 1e3:.1f} ms" in text
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "plan.png"]


def test_readers_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [5, 1000, 7000, 1, 333]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(b"%d" % n for n in lengths))
    (tmp_path / "a.json").write_text(json.dumps(lengths))
    np.save(tmp_path / "a.npy", np.array(lengths, dtype=np.int32))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
    (tmp_path / "a.idx").write_bytes(header + struct.pack(f"<{len(lengths)}i", *lengths))
    digests = set()
    for name in ("a.txt", "a.json", "a.npy", "a.idx"):
        assert main(["plan", "--lengths", str(tmp_path / name), "--ranks", "2", "--json"]) == 0
        obj = json.loads(capsys.readouterr().out)
        assert obj["lengths"] == lengths
        digests.add(obj["digest"])
    assert len(digests) == 1


BAD_INPUT = [
    (["--lengths", "nowhere.txt"], 2, "cannot read lengths 'nowhere.txt'"),
    (["--lengths", "lengths.csv"], 2, "suffix '.csv'"),
    (["--lengths", "negative.txt"], 2, "sample 1 is -3"),
    (["--lengths", "words.txt"], 2, "line 2: found 'many'"),
    (["--lengths", "float.json"], 2, "sample 0 is 1.5"),
    (["--lengths", "zero.json"], 2, "sample 2 is 0"),
    (["--lengths", "object.json"], 2, "found a JSON dict"),
    (["--lengths", "empty.txt"], 2, "no sample found"),
    (["--lengths", "good.txt", "--ranks-per-node", "9"], 2, "ranks_per_node 9 is larger"),
    (["--lengths", "good.txt", "--cost", "b300-gpt9"], 2, "neither a preset"),
    (["--lengths", "good.txt", "--strategy", "best"], 2, "unknown strategy 'best'"),
    (["--lengths", "good.txt", "--lockstep", "3"], 2, "do not tile"),
    (["--lengths", "good.txt", "--memory-gb", "-1"], 2, "memory of -1.0 GB"),
    (["--lengths", "good.txt", "--memory-gb", "nan"], 2, "memory of nan GB"),
    (["--lengths", "good.txt", "--step", "-1"], 2, "--step -1"),
    (["--lengths", "good.txt", "--samples", "1", "--seed", "-1"], 2, "seed -1"),
    (["--lengths", "preset:wiki", "--samples", "0"], 2, "found n 0"),
    (["--lengths", "nothing.npy"], 2, "not a plain .npy array"),
    (["--lengths", "endless.npy"], 2, "not a plain .npy array"),
    (["--lengths", "zip.npy"], 2, "not a plain .npy array"),
    (["--lengths", "open.npy"], 2, "not a plain .npy array"),
    (["--lengths", "endless.idx"], 2, "cut short: 4611686018427387904 sequences"),
    (["--lengths", "header.idx"], 2, "cut short: 12 bytes"),
    (["--lengths", "good.txt", "--out", "no/such/folder.json"], 2, "cannot write"),
    (["--lengths", "good.txt", "--virtual-stages", "2"], 2, "pipeline_stages is 1"),
    (["--lengths", "huge.txt"], 1, "sample 1 of 5000000 tokens needs"),
]


@pytest.mark.parametrize(("options", "code", "words"), BAD_INPUT)
def test_bad_input(
    options: list[str], code: int, words: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    files = {
        "negative.txt": "5\n-3\n", "words.txt": "5\nmany\n", "float.json": "[1.5]",
        "zero.json": "[1, 2, 0]", "object.json": "{}", "empty.txt": "\n", "good.txt": "5\n7\n",
        "huge.txt": "5\n5000000\n", "lengths.csv": "1", "nothing.npy": "",
        "header.idx": "MMIDIDX\0\0\1\0\0",
        "endless.idx": "MMIDIDX\0\0\1" + "\0" * 7 + "\4" + "\0" * 7 + "@" + "\0" * 8,
        "endless.npy": "\x93NUMPY\1\0\x76\0{'descr': '<i8', 'fortran_order': False, "
        + f"'shape': ({10**26},)}}".ljust(75) + "\n",
        "zip.npy": "PK\3\4",
        "open.npy": "\x93NUMPY\1\0\x76\0{'descr': (".ljust(127) + "\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--ranks", "8", "--out", "plan.json", *options]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(files)


@pytest.mark.parametrize(
    ("sent", "code", "words"),
    [(b"\xef\xbb\xbf5\r\n7\n", 0, ""), (b"5\n\xff\n", 2, "lengths on stdin are not UTF-8")],
)
def test_lengths_on_stdin(
    sent: bytes, code: int, words: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(sent), encoding="utf-8"))
    assert main(["plan", "--lengths", "-", "--ranks", "2", "--json"]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    if code == 0:
        assert json.loads(captured.out)["lengths"] == [5, 7]


def test_oversize_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "huge.txt"
    path.write_text("5\n5000000\n7\n")
    base = ["plan", "--lengths", str(path), "--ranks", "8", "--json", "--oversize"]
    assert main([*base, "drop"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["lengths"] == [5, 7]
    assert "drop 1 samples" in captured.err
    assert main([*base, "truncate"]) == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == [5, 409600, 7]


def test_a_shape_quantum_rounds_the_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("5\n64\n65\n")
    base = ["plan", "--lengths", str(path), "--ranks", "8", "--json", "--shape-quantum"]
    assert main([*base, "64"]) == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == [64, 64, 128]
    assert main([*base, "-1"]) == 2
    assert "shape quantum -1" in capsys.readouterr().err


def test_a_pipe_is_written_to_and_a_link_is_followed(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link.json", tmp_path / "target.json"
    os.mkfifo(pipe)
    link.symlink_to(target)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    options = ["plan", *WIKI, "--samples", "8", "--ranks", "8"]
    assert main([*options, "--out", str(pipe)]) == 0
    assert pipe.is_fifo()
    assert main([*options, "--out", str(link)]) == 0
    assert link.is_symlink()
    assert canonical_bytes(loads(os.read(reader, 100_000))) == canonical_bytes(load(target))
    os.close(reader)


@pytest.mark.parametrize(
    ("stdout", "words"), [("closed", ""), ("/dev/full", "cannot write the output: No space left")]
)
def test_stdout_that_takes_no_more_ends_without_a_traceback(stdout: str, words: str) -> None:
    command = [sys.executable, "-m", "megatron_dcp", "plan", *WIKI, "--json"]
    if stdout == "closed":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(stdout, os.O_WRONLY)
    run = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(writer)
    assert run.returncode == 1
    assert run.stderr == (f"mdcp plan: {words} on device\n" if words else "")


def test_a_full_disk_is_a_failure_and_not_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WIKI, "--samples", "8", "--ranks", "8", "--out", "/dev/full"]) == 1
    err = capsys.readouterr().err
    assert err == "mdcp plan: cannot read or write '/dev/full': No space left on device\n"
