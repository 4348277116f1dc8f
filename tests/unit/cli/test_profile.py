"""`mdcp profile` from the command line: models it takes, and bad usage."""

import json
from types import SimpleNamespace

import pytest

from megatron_dcp.cli.main import main
from megatron_dcp.cli.profile import shape_of
from megatron_dcp.cost import load
from megatron_dcp.errors import ConfigError


def test_shape_of_the_usual_config_names():
    ours = SimpleNamespace(layers=4, heads=8, kv_heads=2, hidden=64, vocab=100)
    theirs = SimpleNamespace(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
                             hidden_size=64, vocab_size=100)  # fmt: skip
    assert shape_of(ours, 4) == shape_of(theirs, 4)
    assert shape_of(ours, 4).head_dim == 8
    assert (
        shape_of(SimpleNamespace(n_layer=2, n_head=4, hidden_size=8, vocab_size=5), 2).layers == 2
    )
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        shape_of(SimpleNamespace(heads=1, hidden=2), 4)


def test_one_process_profiles_a_function_and_writes_a_figure(tmp_path, capsys):
    out = tmp_path / "p.json"
    args = ["profile", "--model", "megatron_dcp.testing.models:narrow_gpt", "--max-tokens", "64",
            "--repeats", "1", "--clock", "cpu", "--limit-s", "10", "--out", str(out)]  # fmt: skip
    assert main(args) == 0
    p = load(out)
    assert p.model.hidden == 32
    assert p.fit["points"] > 20
    assert p.static_bytes > 0
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    head = json.loads(out.with_suffix(".points.jsonl").read_text().splitlines()[0])
    assert head["fingerprint"] == dict(p.fingerprint)
    assert "median error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "gpt", "--out", "p.txt"], "ends in .json"),
        (["--model", "bert", "--out", "p.json"], "package.module:function"),
        (["--model", "no.such:thing", "--out", "p.json"], "no"),
        (["--model", "gpt", "--out", "p.json", "--layers", "blocks"], "lists are at"),
        (["--model", "gpt", "--out", "p.json", "--rounds", "0"], "--rounds is 0"),
        (["--model", "gpt", "--out", "p.json", "--device", "tpu"], "--device 'tpu'"),
        (["--model", "gpt", "--out", "p.json", "--limit-s", "nan"], "--limit-s is nan"),
        (["--model", "hf:/no/such/folder", "--out", "p.json"], "--model hf:/no/such/folder"),
    ],
)
def test_bad_usage_exits_2(args, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *args]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_points_cut_by_an_interrupt_are_resumed_and_other_damage_is_named(tmp_path, capsys):
    out = tmp_path / "p.json"
    args = ["profile", "--model", "megatron_dcp.testing.models:narrow_gpt", "--max-tokens", "64",
            "--repeats", "1", "--rounds", "1", "--clock", "cpu", "--out", str(out)]  # fmt: skip
    points = out.with_suffix(".points.jsonl")
    assert main(args) == 0
    whole = points.read_bytes()
    points.write_bytes(whole[:-20])
    assert main(args) == 0
    assert points.read_bytes().count(b"\n") == whole.count(b"\n")
    assert main(args) == 0
    points.write_bytes(b"not points\n" + whole)
    capsys.readouterr()
    assert main(args) == 2
    assert "not a file of measured points" in capsys.readouterr().err
