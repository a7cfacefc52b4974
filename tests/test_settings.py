"""Strict reading: every wrong thing is told at once, with its place and its remedy; right things arrive as typed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from settings import SettingsError, SettingsReader, markdown_reference, write_toml


@dataclass(frozen=True)
class Engine:
    """The engine."""

    power: int = 3
    """Horses."""
    ratio: float = 0.5
    """A share."""
    fuel: Literal["hay", "oats"] | None = None
    """What it eats."""
    names: list[str] = field(default_factory=lambda: ["a"])
    """Names."""
    on: bool = False
    """Running."""

    def problems(self) -> list[tuple[str, str]]:
        return [("power", f"{self.power} is negative; give 0 or more")] if self.power < 0 else []


@dataclass(frozen=True)
class Cart:
    engine: Engine

    def problems(self, road: str) -> list[tuple[str, str]]:
        return [("engine.fuel", f"no {road} with oats")] if self.engine.fuel == "oats" else []


def read(tmp_path: Path, toml: str, *flags: str) -> Engine:
    path = tmp_path / "cart.toml"
    path.write_text(toml)
    reader = SettingsReader(Cart)
    reader.read_toml(path)
    reader.read_flags(list(flags))
    return reader.build(road="mud").engine


def problems(tmp_path: Path, toml: str, *flags: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, toml, *flags)
    return [str(p).replace(str(tmp_path), "") for p in caught.value.problems]


def test_values_arrive_as_typed(tmp_path: Path) -> None:
    toml = '[engine]\npower = 7\nratio = 1\nfuel = "hay"\nnames = ["x", "y"]\non = true\n'
    assert read(tmp_path, toml) == Engine(7, 1.0, "hay", ["x", "y"], True)


def test_flags_override_the_file(tmp_path: Path) -> None:
    flags = [
        "--engine.power",
        "1_000",
        "--engine.ratio=1e-3",
        "--engine.fuel",
        "none",
        "--engine.names",
        "p,q",
        "r",
        "--engine.on",
    ]
    assert read(tmp_path, '[engine]\npower = 7\nfuel = "hay"\n', *flags) == Engine(
        1000, 1e-3, None, ["p", "q", "r"], True
    )
    assert read(tmp_path, "[engine]\non = true\n", "--engine.on", "false") == Engine(on=False)
    assert read(tmp_path, "", "--engine.power", "-0") == Engine(power=0)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    toml = '[engin]\npower = 1\n[engine]\npwer = 1\npower = "3"\nratio = true\nfuel = "oat"\non = 1\nnames = [1]\n'
    found = problems(tmp_path, toml, "--engine.powr", "3", "--engine.ratio", "much", "stray", "--engine.power")
    assert found == [
        '/cart.toml: [engin]: unknown section; did you mean "engine"?',
        '/cart.toml: engine.pwer: unknown key; did you mean "power"?',
        "/cart.toml: engine.power: must be integer, not '3'",
        "/cart.toml: engine.ratio: must be number, not True",
        '/cart.toml: engine.fuel: must be one of "hay", "oats", not \'oat\' (did you mean "oats"?)',
        "/cart.toml: engine.on: must be boolean (true or false), not 1",
        "/cart.toml: engine.names: must be string, not 1",
        'command line: --engine.powr: unknown flag; did you mean "--engine.power"?',
        "command line: --engine.ratio: takes one value (number), 2 given",
        "command line: --engine.power: takes one value (integer), 0 given",
    ]


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--engine.power=2.5", "command line: engine.power: must be integer, not '2.5'"),
        ("--engine.power=true", "command line: engine.power: must be integer, not 'true'"),
        ("--engine.ratio=nan", "command line: engine.ratio: must be number, not nan"),
        ("--engine.on=yes", "command line: engine.on: must be boolean (true or false), not 'yes'"),
        ("--engine.power=-1", "command line: engine.power: -1 is negative; give 0 or more"),
        ("--engine.fuel=oats", "command line: engine.fuel: no mud with oats"),
        ("--power=1", "command line: --power: unknown flag; did you mean \"--engine.power\"?"),
        ("power=1", "command line: power=1: is not a flag; overrides are written --section.key value"),
    ],
)  # fmt: skip
def test_a_wrong_flag(tmp_path: Path, flag: str, text: str) -> None:
    assert problems(tmp_path, "", flag) == [text]


def test_a_value_out_of_range_names_its_file(tmp_path: Path) -> None:
    assert problems(tmp_path, "[engine]\npower = -2\n") == ["/cart.toml: engine.power: -2 is negative; give 0 or more"]


def test_the_resolved_file_reads_back(tmp_path: Path) -> None:
    engine = Engine(power=9, ratio=0.25, names=[], on=True)
    write_toml(Cart(engine), tmp_path / "resolved.toml")
    assert read(tmp_path, (tmp_path / "resolved.toml").read_text()) == engine


def test_the_reference_shows_every_key() -> None:
    text = markdown_reference(Cart)
    assert "## [engine]" in text
    assert '| `fuel` | one of "hay", "oats" or "none" | `"none"` | What it eats. |' in text
    assert '| `names` | list of strings | `["a"]` | Names. |' in text
