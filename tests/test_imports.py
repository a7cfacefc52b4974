"""Who may import whom (docs/architecture.md), read from the source: also what is imported inside of a function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EVERYBODYS = {"errors", "settings"}  # They know nothing of the project.

# package or module -> what it may import of the project, besides itself and EVERYBODYS. What is not named, is free.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "settings": set(),
    "loss": set(),
    "optimizer": {"adamw"},
    "checkpoint": set(),
    "data": set(),
    "telemetry": set(),
    "float8": set(),
    "parallelisms": {"float8", "loss"},
    "models": {"loss"},
}
EXCEPTIONS = {"models/llama/parallelize.py": {"float8", "parallelisms"}}  # Where model and techniques meet.
TRAINER_IS_FOR = {  # These train.
    "train.py", "planning/fake_run.py", "scripts/soak.py", "scripts/bench_checkpoint.py", "scripts/bench.py",
    "scripts/check_plan.py",
}  # fmt: skip


def sources() -> list[str]:
    """The project's modules, without the tests."""
    own = [f for f in ROOT.iterdir() if not f.name.startswith(".") and f.name not in ("tests", "outputs")]
    files = [f for f in own if f.suffix == ".py"] + [f for folder in own for f in folder.rglob("*.py")]
    return sorted(f.relative_to(ROOT).as_posix() for f in files)


def top(path: str) -> str:
    """models/llama/hf.py -> models; loss.py -> loss."""
    return path.split("/")[0].removesuffix(".py")


def imports_of(text: str) -> set[str]:
    """The first parts of the names of all modules that a source imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found.add(str(node.module).split(".")[0])
    return found


def wrong_imports(path: str, text: str, project: set[str]) -> set[str]:
    """What the source at `path` imports of the project and may not."""
    own, wanted = top(path), imports_of(text) & project
    wrong = {"trainer"} & wanted if path not in TRAINER_IS_FOR else set()
    if own in ALLOWED:
        wrong |= wanted - ALLOWED[own] - EXCEPTIONS.get(path, set()) - EVERYBODYS - {own}
    return wrong


def test_every_import_is_allowed() -> None:
    paths = sources()
    project = {top(path) for path in paths}
    assert project >= {*ALLOWED, "config", "trainer", "train"}, "a name in the rules is no longer there"
    assert all(path in paths for path in EXCEPTIONS)
    found = {path: wrong_imports(path, (ROOT / path).read_text(), project) for path in paths}
    assert not {path: wrong for path, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    ("path", "text", "wrong"),
    [
        ("models/llama/model.py", "from parallelisms.fsdp import apply_fsdp", {"parallelisms"}),
        ("models/llama/parallelize.py", "from parallelisms.fsdp import apply_fsdp\nimport float8.convert", set()),
        ("parallelisms/linears.py", "from float8.scaled import Float8Rows", set()),
        ("float8/scaled.py", "def f():\n    import parallelisms.linears as p", {"parallelisms"}),
        ("data/loader.py", "import torch\nfrom errors import UserError\nfrom checkpoint import state", {"checkpoint"}),
        ("scripts/benchmark.py", "from config import load_config\nfrom trainer import Trainer", {"trainer"}),
        ("train.py", "from trainer import Trainer", set()),
    ],
)
def test_a_wrong_import_is_found(path: str, text: str, wrong: set[str]) -> None:
    assert wrong_imports(path, text, {*ALLOWED, "config", "trainer", "train", "scripts"}) == wrong
