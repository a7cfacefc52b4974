"""The documentation speaks of what is there: links, make targets, flags, files, scripts. Its reference is current."""

import re
from pathlib import Path

import pytest

from config import CONFIGS, JobConfig
from scripts.configuration_reference import PAGE, page
from settings import sections_of

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
FLAGS = {f"{name}.{key}" for name, section in sections_of(JobConfig).items() for key in section.__dataclass_fields__}
FLAGS.add("section.key")  # How the pages speak of any of them.
FLAGS |= {"model.converters", "quantize.linear"}  # torchtitan's, in the measurements.
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What a heading can be linked by: lower case, hyphens for spaces, nothing else but letters and digits."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def wrong_links(path: Path, text: str) -> list[str]:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", text)):
        if re.match(r"\w+:", link):
            continue  # Of the web.
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        is_there = not file or target.exists()
        if not is_there or (anchor and anchor not in anchors(target.read_text() if file else text)):
            wrong.append(link)
    return wrong


def wrong_names(text: str) -> list[str]:
    """Make targets, flags, configuration files and scripts that are not there."""
    code = "\n".join([*FENCED.findall(text), *re.findall(r"`[^`\n]+`", text)])
    targets = re.findall(r"(?:^ *\$? *|`|&& )make +([a-z][\w-]*)", code, re.MULTILINE)
    flags = re.findall(r"--(\w+\.\w+)", text)
    configs = re.findall(r"configs/([\w.-]+\.toml)|--config[ =]([\w.-]+\.toml)", text)
    scripts = re.findall(r"-m (scripts(?:\.\w+)+)|(scripts/\w+)\.\w+", text)
    return [
        *(f"make {name}" for name in targets if name not in TARGETS),
        *(f"--{name}" for name in flags if name not in FLAGS),
        *(a or b for a, b in configs if not (CONFIGS / (a or b)).is_file()),
        *(a or b for a, b in scripts if not list(ROOT.glob((a or b).replace(".", "/") + ".*"))),
    ]


def test_the_configuration_reference_is_current() -> None:
    assert PAGE.read_text() == page(), "run make docs"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_speaks_of_what_is_there(path: Path) -> None:
    text = path.read_text()
    assert wrong_links(path, text) == []
    assert wrong_names(text) == []


def test_the_pages_that_the_code_points_to_are_there() -> None:
    sources = [f for depth in ("*.py", "*/*.py", "*/*/*.py") for f in ROOT.glob(depth)]
    own = [f for f in sources if not f.relative_to(ROOT).parts[0].startswith((".", "tests"))]
    named = {name for f in own for name in re.findall(r"docs/[\w-]+\.md", f.read_text())}
    assert named and not [name for name in named if not (ROOT / name).is_file()]


def test_what_is_not_there_is_found() -> None:
    text = """# A page
See [this](#a-page), [that](#b-page), [the code](trainer.py), [no code](trainr.py), [the web](https://example.org/x).
Run `make train`, or `make trian ARGS=x`; make sure that it runs.
```
make tset
torchrun train.py --config debug.toml --training.seq_len 4 --training.seq_lenn 4
torchrun train.py --config debgu.toml, which is configs/debug.toml and not configs/llama9b.toml
python -m scripts.wire_bytes, python -m scripts.wire_byte, scripts/wire_bytes.py, scripts/slurm.sh
```
"""
    assert wrong_links(ROOT / "PAGE.md", text) == ["#b-page", "trainr.py"]
    assert sorted(wrong_names(text)) == [
        "--training.seq_lenn",
        "debgu.toml",
        "llama9b.toml",
        "make trian",
        "make tset",
        "scripts.wire_byte",
        "scripts/slurm",
    ]
