"""The documented API against the surface on record: nothing that would break a caller."""

import importlib.util

import pytest

griffe = pytest.importorskip("griffe", reason="griffe is not installed (pip install griffe)")


@pytest.fixture(scope="module")
def api(request):
    path = request.config.rootpath / "scripts/dev/api.py"
    spec = importlib.util.spec_from_file_location("mdcp_api", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def package(api):
    return api.load()


def breakages(api, package, texts):
    for name, text in texts.items():
        with griffe.temporary_visited_module(text, module_name=name.replace(".", "_")) as old:
            yield from griffe.find_breaking_changes(old, api.find(package, name))


def test_nothing_on_record_was_broken(api, package):
    texts = {p.stem: p.read_text() for p in sorted(api.STUBS.glob("*.pyi"))}
    assert len(texts) > 15
    found = [b.explain() for b in breakages(api, package, texts)]
    assert not found, "\n".join(
        [*found, "if this break is intended: python scripts/dev/api.py, and a changelog entry"]
    )


def test_what_is_documented_is_on_record(api):
    for name, text in api.stubs().items():
        recorded = (api.STUBS / f"{name}.pyi").read_text()
        names = [x for x in text.splitlines() if x.startswith(("class ", "def "))]
        for line in names:
            head = line.partition("(")[0].rstrip(":")
            assert head in recorded, f"{name}: {head}: run python scripts/dev/api.py"


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("measure: bool = False", "observed: bool = False", "Parameter was removed"),
        ("strategy: str = 'dcp'", "strategy: str = 'static'", "Parameter default was changed"),
    ],
)
def test_a_break_is_found(api, package, old, new, kind):
    name = "megatron_dcp.adapters.torch"
    text = (api.STUBS / f"{name}.pyi").read_text()
    assert new not in text
    found = list(breakages(api, package, {name: text.replace(old, new)}))
    assert any(b.kind.value == kind for b in found), found


def test_everything_documented_has_a_docstring(api, package):
    for module, found, _ in api.documented(package):
        assert found.has_docstring, f"{module}.{found.name}"
