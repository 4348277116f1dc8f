"""Every `mdcp` command in a document is parsed by the command's own parser; named files exist.

Of commands in the text, which may be cut short, every option has to be one of the command's.
"""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import tyro

from megatron_dcp.adapters.megatron.flags import add_flags
from megatron_dcp.cli import bench_attention, bench_planner, doctor, patch, plan
from megatron_dcp.cli.bench_end_to_end.options import EndToEndOptions
from megatron_dcp.cli.main import COMMANDS
from megatron_dcp.cli.profile import ProfileOptions
from megatron_dcp.cli.report import ReportOptions
from megatron_dcp.cli.simulate.options import SimulateOptions
from megatron_dcp.cli.train.options import TrainOptions
from megatron_dcp.planner.registry import find_strategy

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(p for folder in ("docs", "docker", "benchmarks", "patches", "examples")
      for p in sorted((ROOT / folder).rglob("*.md")) if "_build" not in p.parts),
]  # fmt: skip
NAMES = "|".join(COMMANDS)
PREFIX = r"(?:mdcp|-m megatron_dcp|scripts/launch/\S+(?: -\S+ \S+)*)"
# An indented line, or code between backticks; both may go on over lines.
INDENTED = re.compile(rf"^ {{4}}(?:\S.* )?{PREFIX} ((?:{NAMES})(?: .*)?)$", re.M)
INLINE = re.compile(rf"`(?:[^`\n]* )?{PREFIX} ((?:{NAMES}) [^`]*)`")
PLACEHOLDERS = {"MEGATRON_FLAGS...", "ALL_OF_MEGATRONS_OWN_FLAGS"}


def launch(argv):
    """The flags before the script, and ours among the script's; Megatron's own are not known."""
    rest = list(argv)
    while rest[0] in ("--allow-cpu", "--nproc-per-node"):
        rest = rest[1:] if rest[0] == "--allow-cpu" else rest[2:]
    assert rest[0].endswith(".py")
    parsed, unknown = add_flags(argparse.ArgumentParser()).parse_known_args(rest[1:])
    assert parsed.mdcp
    assert not [x for x in unknown if x.startswith("--mdcp")]


def bench(argv):
    if argv[0] == "end-to-end":
        tyro.cli(EndToEndOptions, args=argv[1:])
        return
    {"planner": bench_planner, "attention": bench_attention}[argv[0]].parser().parse_args(argv[1:])


PARSERS = {
    "plan": lambda argv: plan.parser().parse_args(argv),
    "simulate": lambda argv: tyro.cli(SimulateOptions, args=argv),
    "profile": lambda argv: tyro.cli(ProfileOptions, args=argv),
    "train": lambda argv: tyro.cli(TrainOptions, args=argv),
    "report": lambda argv: tyro.cli(ReportOptions, args=argv),
    "doctor": lambda argv: doctor.parser().parse_args(argv),
    "patch": lambda argv: patch.parser().parse_args(argv),
    "bench": bench,
    "launch": launch,
}


def commands(page):
    lines = page.read_text().replace("\\\n", " ")
    return [re.split(r"\s{3,}(?=[a-z#])", m[1])[0] for m in INDENTED.finditer(lines)]


def test_the_launch_scripts_show_commands_that_parse():
    found = 0
    for script in sorted((ROOT / "scripts/launch").iterdir()):
        text = re.sub(r"\[[^\]]*\]", "", script.read_text())  # [options]
        for command in re.findall(r"^# {3}(?:.* )?(train\b.*)$", text, re.M):
            argv = command.split()[1:]
            PARSERS["train"](["8" if a == "N" else a for a in argv])
            found += 1
    assert found >= 4


def mentions(page):
    return [" ".join(m[1].split()) for m in INLINE.finditer(page.read_text())]


def test_commands_are_found_in_the_documents():
    every = [c for page in PAGES for c in commands(page)]
    assert {c.split()[0] for c in every} == set(COMMANDS)
    assert len(every) > 30
    assert len([c for page in PAGES for c in mentions(page)]) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_commands_have_these_options(page):
    for command in commands(page):
        name, *argv = shlex.split(command, comments=True)
        argv = [a for a in argv if a not in PLACEHOLDERS]
        try:
            PARSERS[name](argv)
        except SystemExit as error:
            pytest.fail(f"{page.name}: mdcp {command}: refused with status {error.code}")
        for option in ("--strategies", "--strategy"):
            if option in argv and argv[argv.index(option) + 1] != "all":
                for strategy in argv[argv.index(option) + 1].split(","):
                    if strategy:  # "" is none
                        find_strategy(strategy)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_options_named_in_the_text_exist(page, capsys):
    for command in mentions(page):
        name, *argv = command.split()
        if name == "launch":
            continue  # its options are the script's
        head = argv[:1] if name == "bench" else []
        with pytest.raises(SystemExit):
            PARSERS[name]([*head, "--help"])
        known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        for option in re.findall(r"--[\w-]+", command):
            assert option in known, f"{page.name}: mdcp {command}: {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_documents_name_exist(page):
    named = re.findall(
        r"(?<![\w/.-])((?:scripts|tests|benchmarks|examples|megatron_dcp|csrc|docs|docker|patches)"
        r"/[\w./-]*\w)(?![\w*<{])", page.read_text(),
    )  # fmt: skip
    for name in named:
        path = name.removesuffix("/")
        assert (ROOT / path).exists() or list(ROOT.glob(path + "*")), f"{page.name}: {name}"
