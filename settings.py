"""Strict settings: a TOML file and command-line overrides become checked dataclasses.

Knows nothing of Rowhouse's own keys. A settings class is a dataclass of sections, a section a frozen dataclass of
keys; the text below a key is its help:

    @dataclass(frozen=True)
    class TrainingConfig:
        seq_len: int = 2048
        \"\"\"Tokens in one sequence.\"\"\"

Everything that is wrong is collected as a `Problem` and told at once, each with its place and its remedy. The file and
the flags go through the same checks, which is why the flags are not parsed by a library of their own.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import math
import textwrap
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from errors import UserError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where (file or command line), the key, and a sentence with the remedy."""

    place: str
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.text}"


class SettingsError(UserError):
    """All the problems found, one a line."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        many = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        super().__init__(f"{many} in the configuration:\n" + "\n".join(f"  {p}" for p in problems))


def field_docs(section: type) -> dict[str, str]:
    """The string literal after each field of a dataclass: field name -> text on one line."""
    (class_node,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(class_node, ast.ClassDef)
    docs = {}
    for field, text in zip(class_node.body, class_node.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs


def sections_of(settings_class: type) -> dict[str, type]:
    """Section name -> its dataclass, in the order of declaration."""
    return typing.get_type_hints(settings_class)


def type_text(kind: Any) -> str:
    """A type as the user reads it: `integer`, `one of "a", "b"`, `list of strings`."""
    if kind is types.NoneType:
        return '"none"'
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(type_text(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{a}"' for a in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return f"list of {type_text(typing.get_args(kind)[0])}s"
    return {int: "integer", float: "number", bool: "boolean (true or false)", str: "string"}[kind]


def check_value(value: Any, kind: Any) -> Any:
    """`value` as type `kind`; raises ValueError with what was expected.

    Kinds: int, float, bool, str, Literal of strings, list of one of these, and one of these `| None` (TOML has no null:
    it is written "none"). An integer serves as a float.
    """
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        (inner,) = (k for k in typing.get_args(kind) if k is not types.NoneType)
        return None if value is None or value == "none" else check_value(value, inner)
    if typing.get_origin(kind) is Literal:
        if isinstance(value, str) and value in typing.get_args(kind):
            return value
        close = difflib.get_close_matches(str(value), typing.get_args(kind), 1)
        hint = f' (did you mean "{close[0]}"?)' if close else ""
        raise ValueError(f"must be {type_text(kind)}, not {value!r}{hint}")
    if typing.get_origin(kind) is list:
        if isinstance(value, list):
            return [check_value(item, typing.get_args(kind)[0]) for item in value]
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
    elif kind in (int, bool, str) and type(value) is kind:
        return value
    raise ValueError(f"must be {type_text(kind)}, not {value!r}")


def parse_text(text: str, kind: Any) -> Any:
    """A command-line word as TOML would have given it for `kind`; the text itself where it can't be read so."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        (inner,) = (k for k in typing.get_args(kind) if k is not types.NoneType)
        return text if text == "none" else parse_text(text, inner)
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind in (int, float):
        for read in (int, float) if kind is float else (int,):
            try:
                return read(text.replace("_", ""))
            except ValueError:
                continue
    return text


def nearest(name: str, known: typing.Iterable[str], what: str) -> str:
    """'did you mean "x"?', or the list of known names where nothing is near."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    return f'did you mean "{close[0]}"?' if close else f"the {what} are: {', '.join(known)}"


class SettingsReader:
    """Collects values and problems from the sources, file first, then flags; `build` makes the settings or raises."""

    def __init__(self, settings_class: type):
        self.settings_class = settings_class
        self.sections = sections_of(settings_class)
        self.kinds = {name: typing.get_type_hints(section) for name, section in self.sections.items()}
        self.values: dict[str, dict[str, Any]] = {name: {} for name in self.sections}
        self.places: dict[tuple[str, str], str] = {}
        self.problems: list[Problem] = []

    def add(self, place: str, section: str, key: str, value: Any) -> None:
        """Checks one value of a known key and keeps it."""
        try:
            self.values[section][key] = check_value(value, self.kinds[section][key])
            self.places[section, key] = place
        except ValueError as error:
            self.problems.append(Problem(place, f"{section}.{key}", str(error)))

    def read_toml(self, path: Path) -> None:
        place = str(path)
        try:
            content = tomllib.loads(path.read_text())
        except OSError as error:
            raise UserError(f"{place}: cannot be read ({error.strerror}); give --config a file that can") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{place}: not valid TOML: {error}") from error
        for section, entries in content.items():
            if section not in self.sections:
                hint = nearest(section, self.sections, "sections")
                self.problems.append(Problem(place, f"[{section}]", f"unknown section; {hint}"))
            elif not isinstance(entries, dict):
                self.problems.append(Problem(place, section, f"is a section; write [{section}] and keys below it"))
            else:
                for key, value in entries.items():
                    if key not in self.kinds[section]:
                        self.problems.append(Problem(place, f"{section}.{key}", self.unknown_key(section, key)))
                    else:
                        self.add(place, section, key, value)

    def read_flags(self, flags: list[str]) -> None:
        """Reads `--section.key value`, `--section.key=value`, and `--section.key` alone for a boolean."""
        words = [word for flag in flags for word in (flag.split("=", 1) if flag.startswith("--") else [flag])]
        while words:
            flag, arguments = words.pop(0), []
            while words and not words[0].startswith("--"):
                arguments.append(words.pop(0))
            self.read_flag(flag, arguments)

    def read_flag(self, flag: str, arguments: list[str]) -> None:
        place, name = "command line", flag.removeprefix("--")
        section, _, key = name.partition(".")
        if not flag.startswith("--"):
            self.problems.append(Problem(place, flag, "is not a flag; overrides are written --section.key value"))
        elif section not in self.sections or key not in self.kinds[section]:
            known = [f"--{s}.{k}" for s, keys in self.kinds.items() for k in keys]
            self.problems.append(Problem(place, flag, f"unknown flag; {nearest(flag, known, 'flags')}"))
        else:
            kind = self.kinds[section][key]
            if typing.get_origin(kind) is list:
                items = [item for word in arguments for item in word.split(",") if item]
                self.add(place, section, key, [parse_text(item, typing.get_args(kind)[0]) for item in items])
            elif not arguments and kind is bool:
                self.add(place, section, key, True)
            elif len(arguments) != 1:
                text = f"takes one value ({type_text(kind)}), {len(arguments)} given"
                self.problems.append(Problem(place, flag, text))
            else:
                self.add(place, section, key, parse_text(arguments[0], kind))

    def unknown_key(self, section: str, key: str) -> str:
        elsewhere = [other for other, keys in self.kinds.items() if key in keys]
        if key not in difflib.get_close_matches(key, self.kinds[section]) and elsewhere:
            return f"unknown key; it belongs to [{elsewhere[0]}]"
        return f"unknown key; {nearest(key, self.kinds[section], f'keys of [{section}]')}"

    def place_of(self, name: str) -> str:
        """Where `section.key` was set: the file, the command line, or the defaults."""
        section, _, key = name.partition(".")
        return self.places.get((section, key), "default")

    def build(self, **circumstances: Any) -> Any:
        """The settings. Raises SettingsError with every problem, those of the sections and of the whole included.

        `circumstances` go to the settings' own `problems`: what the keys alone do not tell.
        """
        settings = self.settings_class(
            **{name: section(**self.values[name]) for name, section in self.sections.items()}
        )
        found = problems_of(settings, **circumstances)
        self.problems += [Problem(self.place_of(name), name, text) for name, text in found]
        if self.problems:
            raise SettingsError(self.problems)
        return settings


def problems_of(settings: Any, **circumstances: Any) -> list[tuple[str, str]]:
    """(section.key, what is wrong; what to do), of each section and of the whole."""
    sections = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    found = [(f"{name}.{key}", text) for name, s in sections.items() for key, text in getattr(s, "problems", list)()]
    return found + settings.problems(**circumstances)


def default_of(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def toml_text(value: Any) -> str:
    """A value as it would stand in the TOML file; None reads "none"."""
    # Numbers, strings, booleans and lists of them are written alike in TOML and JSON.
    return json.dumps("none" if value is None else value)


def write_toml(settings: Any, path: Path) -> None:
    """Writes every key of every section, resolved; the file can be given to --config again."""
    content = {
        section: {key: "none" if value is None else value for key, value in entries.items()}
        for section, entries in dataclasses.asdict(settings).items()
    }
    path.write_text(tomli_w.dumps(content))


def add_help(parser: argparse.ArgumentParser, settings_class: type) -> None:
    """Shows every key of every section in --help, grouped, with type and default."""
    for name, section in sections_of(settings_class).items():
        group = parser.add_argument_group(f"[{name}]", " ".join((section.__doc__ or "").split()))
        docs, kinds = field_docs(section), typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            text = f"{docs[field.name]} ({type_text(kinds[field.name])}; default: {toml_text(default_of(field))})"
            group.add_argument(f"--{name}.{field.name}", metavar="", help=text.replace("%", "%%"))


def markdown_reference(settings_class: type) -> str:
    """docs/configuration.md's tables: one section a heading, one key a row."""
    lines = []
    for name, section in sections_of(settings_class).items():
        lines += [f"## [{name}]", "", " ".join((section.__doc__ or "").split()), ""]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        docs, kinds = field_docs(section), typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            cells = [field.name, type_text(kinds[field.name]), toml_text(default_of(field)), docs[field.name]]
            key, kind, default, text = (cell.replace("|", "\\|") for cell in cells)
            lines.append(f"| `{key}` | {kind} | `{default}` | {text} |")
        lines.append("")
    return "\n".join(lines)
