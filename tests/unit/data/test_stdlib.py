"""The standard-library corpus is real, long-tailed and cut only when asked."""

import ast

import numpy as np
import pytest

from megatron_dcp.data.stdlib import stdlib_corpus
from megatron_dcp.errors import ConfigError


@pytest.fixture(scope="module")
def corpus():
    return stdlib_corpus()


def test_it_has_the_long_tail_of_text(corpus):
    lengths = np.sort(corpus.lengths)
    top = lengths[-len(lengths) // 100 :].astype(float)
    assert len(lengths) > 4000
    assert 300 < np.median(lengths) < 550
    assert lengths[-1] > 50_000
    assert top.sum() / lengths.sum() > 0.15
    assert (top**2).sum() / (lengths.astype(float) ** 2).sum() > 0.5


def test_each_sample_is_one_definition(corpus):
    for i in range(0, len(corpus), 500):
        body = ast.parse(bytes(corpus[i].astype(np.uint8))).body
        assert len(body) == 1
        assert isinstance(body[0], (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def test_clip_counts_what_it_cuts(corpus):
    cut = corpus.clip(1000)
    long = [n for n in corpus.lengths if n > 1000]
    assert cut.clipped == len(long)
    assert cut.cut_tokens == sum(corpus.lengths) - sum(cut.lengths) == sum(long) - 1000 * len(long)
    assert max(cut.lengths) == 1000
    assert corpus.clip(10**9).clipped == 0
    with pytest.raises(ConfigError, match="max_length"):
        corpus.clip(0)


def test_decorators_belong_to_their_function(tmp_path):
    (tmp_path / "a.py").write_text("import os\n\n@property\ndef f(x):\n    return x\n\ny = 1\n")
    assert stdlib_corpus(tmp_path).samples == (b"@property\ndef f(x):\n    return x",)


def test_packages_and_tests_are_not_entered(tmp_path):
    for folder in ("json", "site-packages/pip", "json/test"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(f"def f():\n    return {folder!r}\n")
    assert stdlib_corpus(tmp_path).samples == (b"def f():\n    return 'json'",)


def test_files_that_do_not_parse_are_left_out_and_an_empty_library_is_an_error(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match="no Python source"):
        stdlib_corpus(tmp_path)
