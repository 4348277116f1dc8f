"""`mdcp train`: what is refused before the corpus is read and the machine measured."""

from __future__ import annotations

import pytest

from megatron_dcp.cli.main import main


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--strategies", "packed:x"], "packed:x"),
        (["--strategies", "static:2"], "static:2"),
        (["--strategies", ","], "--strategies ',' names none"),
        (["--strategies", "packed:2"], "names none that runs on 1 ranks"),
        (["--ranks-per-node", "3"], "ranks_per_node 3"),
        (["--ranks-per-node", "0"], "--ranks-per-node is 0"),
        (["--link-mbytes-per-s", "nan"], "--link-mbytes-per-s is nan"),
        (["--link-mbytes-per-s", "inf"], "--link-mbytes-per-s is inf"),
        (["--train-steps", "1", "--cost", "missing.json"], "missing.json"),
        (["--lr", "nan"], "--lr is nan"),
        (["--memory-tokens", "-1"], "--memory-tokens"),
        (["--shape-quantum", "-1"], "--shape-quantum is -1"),
        (["--shape-quantum", "64", "--suite", "quickstart"], "belongs to --suite one"),
        (["--watchdog-s", "0"], "--watchdog-s is 0"),
        (["--out", __file__], "is not a folder"),
    ],
)
def test_bad_usage_is_refused_at_once(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *args]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "definitions" not in captured.err
