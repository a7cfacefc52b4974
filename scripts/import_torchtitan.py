"""A TOML of torchtitan 0.1 or 0.2 -> one of Rowhouse's, and what of it has no counterpart.

    python -m scripts.import_torchtitan its.toml --output ours.toml
    python -m scripts.import_torchtitan its.toml > ours.toml

Every key is carried over, translated, or told on stderr: its value, why, and what to do instead. Defaults that differ
are written. Exit status: 0; 1, something that is told changes what is trained, or needs something of you; 2, a sentence
on what is wrong, and nothing is written. docs/torchtitan.md says more.
"""

import argparse
import json
import math
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import nn

from checkpoint.config import CheckpointConfig
from config import load_config
from errors import ExitStatus, UserError
from models.llama.model import Llama
from models.llama.shapes import FLAVORS
from scripts import torchtitan_keys as keys
from scripts.torchtitan_keys import FLOAT8, RENAMED, SAME, SECTIONS, TRANSLATED
from settings import Problem, SettingsError, check_value, nearest


@dataclass(frozen=True)
class Told:
    """A key that is not simply carried over."""

    key: str
    value: Any
    text: str
    matters: bool

    def __str__(self) -> str:
        return f"{self.key} = {shown(self.value)}: {self.text}"


def shown(value: Any) -> str:
    return json.dumps(value, default=str)


@dataclass
class Translation:
    """`given`, a file's keys, flat ("section.key"), to `ours`, and what is to be told of them."""

    source: Path
    given: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    anyway: list[str] = field(default_factory=list)
    """What the file asks for and Rowhouse always does."""
    defaults: list[str] = field(default_factory=list)
    """Keys of ours that are written because torchtitan's default is another."""

    def __post_init__(self) -> None:
        old, new = not keys.SIGNS_OF_0_1.isdisjoint(self.given), not keys.SIGNS_OF_0_2.isdisjoint(self.given)
        self.version = "0.1" if old and not new else "0.2"
        self.is_version_known = old != new
        self.carry_over()
        self.model()
        self.tokenizer()
        self.float8()
        self.optimizer()
        self.schedule()
        self.batch()
        self.dataset("training")
        self.validation()
        self.async_tensor_parallel()
        self.activation_checkpoint()
        self.compile()
        self.checkpoint()

    def tell(self, key: str, text: str, *, matters: bool = False, default: Any = None) -> None:
        """`default` is torchtitan's, for a key that the file does not have."""
        self.told.append(Told(key, self.given.get(key, default), text, matters))

    def write_default(self, key: str, value: Any) -> None:
        self.ours[key] = value
        self.defaults.append(key)

    def carry_over(self) -> None:
        first: dict[str, str] = {}
        for key, value in self.given.items():
            name = RENAMED.get(key, key)
            other = first.setdefault(name.removeprefix("quantize.linear."), key)
            if self.given[other] != value:
                raise UserError(
                    f"{self.source}: {key}: contradicts {other}, an older or newer name: remove one of them"
                )
            if key in SAME or key in RENAMED:
                self.ours[name] = value
            elif key in keys.GONE_BY_KEY:
                gone = keys.GONE_BY_KEY[key]
                if value == gone.idle[key]:
                    self.anyway.append(f"{key} = {shown(value)}")
                else:
                    self.tell(key, f"{gone.why}; {gone.instead}", matters=gone.matters)
            elif key not in TRANSLATED:
                text = "torchtitan 0.1 and 0.2 have no such key: it is another version's, your own, or misspelt"
                self.tell(key, text, matters=True)

    def model(self) -> None:
        name, flavor = self.given.get("model.name", "llama3"), self.given.get("model.flavor", "debugmodel")
        if name != "llama3":
            text = f'Rowhouse trains llama3 alone, and not "{name}": there is nothing to import'
            raise UserError(f"{self.source}: model.name: {text}")
        base = re.sub(r"_(flex|varlen)(_attn)?$", "", flavor)
        shapes = {shape: shape for shape in FLAVORS} | keys.SHAPES[self.version]
        if base not in shapes:
            hint = nearest(flavor, FLAVORS, "flavors here")
            raise UserError(f'{self.source}: model.flavor: there is no "{flavor}", and no way to its shape; {hint}')
        self.ours["model.flavor"] = shapes[base]
        if "model.name" in self.given:
            self.ours["model.name"] = name
        if base == "debugmodel":
            text = "Rowhouse's has another shape: 4 layers of 8 heads, not 6 of 16"
            self.tell("model.flavor", text, matters=True, default=flavor)
        elif base not in keys.SHAPES[self.version]:
            self.tell("model.flavor", "it is not torchtitan's; taken for Rowhouse's of that name", matters=True)
        elif base == "405B" and self.version == "0.1":
            self.tell("model.flavor", "it has the rotary scaling of Llama 3.1, which 0.1 has not", matters=True)
        elif base != "405B" and not self.is_version_known:
            text = f'taken for 0.2\'s, {shapes[base]} here; if the file is of 0.1, put "{base}"'
            self.tell("model.flavor", text, matters=True)
        if base != flavor:
            text = "documents in one sequence do not see each other there; here they do"
            self.tell("model.flavor", text, matters=True)

    def tokenizer(self) -> None:
        # The older key comes first in torchtitan too.
        given = [key for key in ("model.tokenizer_path", "model.hf_assets_path") if self.given.get(key)]
        key = given[0] if given else "model.tokenizer_path"
        path = self.given[key] if given else keys.TOKENIZERS[self.version]
        self.ours["model.tokenizer_path"] = path
        if not given:
            self.tell(key, "torchtitan's default, of its checkout, is written; put yours", matters=True, default=path)
        if len(given) == 2 and self.given[given[1]] != path:
            self.tell(given[1], "model.tokenizer_path comes before it, there too")
        if path.endswith(".model"):
            text = "tiktoken's format is not read; give the folder that python -m scripts.download_assets makes of the "
            text += "same model, whose tokens are the same"
            self.tell(key, text, matters=True, default=path)

    def float8(self) -> None:
        converters = self.given.get("model.converters", [])
        if "model.converters" in self.given and not converters:
            self.anyway.append("model.converters = []")
        for name in converters:
            if name not in FLOAT8:
                text = f'there is no "{name}"; float8.recipe_name = "rowwise" is nearest'
                self.tell("model.converters", text, matters=True)
        recipe_key, filter_key = (
            next((f"{section}.{key}" for section in FLOAT8 if f"{section}.{key}" in self.given), None)
            for key in ("recipe_name", "filter_fqns")
        )
        if not set(converters) & set(FLOAT8):
            for key in filter(None, (recipe_key, filter_key)):
                self.tell(key, "has no effect, there either: model.converters does not name it")
            return
        recipe = self.given[recipe_key] if recipe_key else "tensorwise"
        if recipe == "tensorwise" and self.ours.get("parallelism.tensor_parallel_degree", 1) > 1:
            recipe = "rowwise"
            text = "tensorwise does not work with tensor parallelism here; rowwise, which is more precise, is written"
            self.tell(recipe_key or "model.converters", text, matters=True)
        self.ours["float8.recipe_name"] = recipe
        if filter_key is None:
            self.write_default("float8.filter_fqns", [])
        else:
            self.ours["float8.filter_fqns"] = list(self.filters_that_match(filter_key))

    def filters_that_match(self, key: str) -> Iterator[str]:
        """Rowhouse refuses filters that match nothing."""
        with torch.device("meta"):
            model = Llama(FLAVORS[self.ours["model.flavor"]], max_seq_len=1)
        linears = ["output", *(name for name, module in model.named_modules() if isinstance(module, nn.Linear))]
        for pattern in self.given[key]:
            if pattern == "auto_filter_small_kn":
                text = f'there is no "{pattern}"; name the layers that are to stay in bf16, or none'
                self.tell(key, text, matters=True)
            elif any(pattern in name for name in linears):
                yield pattern
            else:
                self.tell(key, f'"{pattern}" matches no linear layer of this model, and is left out')

    def optimizer(self) -> None:
        name = self.given.get("optimizer.name", "AdamW")
        if "optimizer.name" in self.given:
            self.ours["optimizer.name"] = "AdamW"
        # Without weight decay, Adam and AdamW are one.
        if name != "AdamW" and not (name == "Adam" and self.ours.get("optimizer.weight_decay") == 0):
            self.tell("optimizer.name", "there is AdamW alone, and it is written", matters=True)
        self.write_default("optimizer.no_weight_decay", [])
        key = "optimizer.implementation"
        if self.ours.get("training.enable_cpu_offload") and self.ours.get(key, "fused") == "fused":
            self.ours[key] = "foreach"
            text = 'training.enable_cpu_offload needs "foreach" here, which is written; results are the same'
            self.tell(key, text, default="fused")

    def schedule(self) -> None:
        key, steps = "lr_scheduler.warmup_steps", self.ours.get("training.steps", 10000)
        steps = self.ours.get("lr_scheduler.total_steps", steps)
        if self.ours.get(key, 200) > steps:
            self.ours[key] = steps
            self.tell(key, f"is more than the schedule has: {steps} is written, which torchtitan takes", default=200)

    def batch(self) -> None:
        if self.ours.get("training.max_norm") == math.inf:
            self.ours["training.max_norm"] = 0.0  # How Rowhouse writes that nothing is clipped.
        if self.ours.get("training.global_batch_size", 1) < 0:
            self.ours["training.global_batch_size"] = -1

    def dataset(self, section: str) -> None:
        key, path_key = f"{section}.dataset", f"{section}.dataset_path"
        # What is not used yet needs nothing of anybody.
        matters = section == "training" or self.ours.get("validation.enable", False)
        name, path = self.given.get(key, keys.DATASETS[section]).lower(), self.given.get(path_key)
        if key not in self.given:
            self.defaults.append(key)
        if name == "c4_test":
            self.ours[key], self.ours[path_key] = "jsonl", path or keys.C4_TEST
            if path is None:
                text = "a folder of torchtitan's checkout, which dataset_path names; see that it is there"
                self.tell(key, text, matters=matters, default=name)
        elif name in keys.C4_FILES and path in (None, "allenai/c4"):
            self.ours[key] = name
        elif name in keys.C4_FILES:
            self.ours[key], self.ours[path_key] = "jsonl", f"{path}/{keys.C4_FILES[name]}"
            text = f"taken for a copy of allenai/c4: {keys.C4_FILES[name]} in it is written; see that it fits"
            self.tell(path_key, text, matters=matters)
        else:
            self.ours[key], self.ours[path_key] = "hf", path or self.given[key]
            text = 'not torchtitan\'s: "hf" is written, which reads the field "text" of its split "train"'
            self.tell(key, text, matters=matters)

    def validation(self) -> None:
        key, is_on = "validation.seq_len", self.ours.get("validation.enable", False)
        if is_on or not {"validation.dataset", "validation.dataset_path"}.isdisjoint(self.given):
            self.dataset("validation")
        if is_on and "validation.steps" not in self.ours:
            self.write_default("validation.steps", -1)
        if (is_on or key in self.given) and self.given.get(key, 2048) != self.ours.get("training.seq_len", 2048):
            text = "sequences have training.seq_len in validation too; its loss is of those"
            self.tell(key, text, default=2048)
        elif key in self.given:
            self.anyway.append(f"{key} = {self.given[key]}")

    def async_tensor_parallel(self) -> None:
        key = "parallelism.enable_async_tensor_parallel"
        if self.ours.get(key) and self.ours.get("parallelism.tensor_parallel_degree", 1) == 1:
            del self.ours[key]
            self.tell(key, "has no effect at parallelism.tensor_parallel_degree 1, there either; it is left out")

    def activation_checkpoint(self) -> None:
        key, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
        is_selective = self.ours.get(key, "selective") == "selective"
        if is_selective and option not in self.ours:
            self.write_default(option, "2")
        if self.ours.get(option) == "0":
            del self.ours[option]
            if is_selective:
                self.ours[key] = "full"
            self.tell(option, 'every block in mode "selective", which is activation_checkpoint.mode = "full"')

    def compile(self) -> None:
        if self.ours.get("compile.components") == []:
            del self.ours["compile.components"]
            self.ours["compile.enable"] = False
            self.tell("compile.components", "compiles nothing; compile.enable = false is written")

    def checkpoint(self) -> None:
        path, in_hf, step, exclude, last_in_hf, dtype = (
            f"checkpoint.{name}" for name in ("initial_load_path", "initial_load_in_hf", "load_step",
            "exclude_from_loading", "last_save_in_hf", "export_dtype")
        )  # fmt: skip
        if not self.ours.get("checkpoint.enable"):
            for key in (path, in_hf, step, exclude, last_in_hf):
                if key in self.ours and self.ours[key] != getattr(CheckpointConfig(), key.removeprefix("checkpoint.")):
                    del self.ours[key]
                    self.tell(key, "has no effect while checkpoint.enable is false, there either; it is left out")
        if self.ours.get(in_hf) and path not in self.ours:
            self.ours[path] = self.ours["model.tokenizer_path"]
            self.tell(in_hf, "checkpoint.initial_load_path is written: the folder of model.hf_assets_path, as there")
        elif path in self.ours and not self.ours.get(in_hf):
            text = "torchtitan's checkpoints are not read; let it export the weights for Hugging Face, and set "
            self.tell(path, text + in_hf, matters=True)
        if self.ours.get(step, -1) != -1:
            self.tell(step, "torchtitan's checkpoints are not read; it is a step of Rowhouse's here", matters=True)
        if exclude in self.ours:
            self.ours[exclude] = ["data" if name == "dataloader" else name for name in self.ours[exclude]]
        if self.ours.get(dtype, "float32") != "float32" and not self.ours.get(last_in_hf):
            del self.ours[dtype]
            self.tell(dtype, f"is of the export for Hugging Face alone here, and left out; {last_in_hf} makes one")

    def toml(self) -> str:
        content: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for section, settings in SECTIONS.items():
            for key in (f.name for f in fields(settings)):
                if f"{section}.{key}" in self.ours:
                    content[section][key] = self.ours[f"{section}.{key}"]
        header = f"# From {self.source.name}, of torchtitan {self.version}, by python -m scripts.import_torchtitan.\n\n"
        return header + tomli_w.dumps({section: entries for section, entries in content.items() if entries})

    def report(self) -> str:
        groups: dict[str, Sequence[object]] = {
            "Changes what is trained, or needs something of you:": [told for told in self.told if told.matters],
            "Is not as there, and trains the same:": [told for told in self.told if not told.matters],
            "Written, as torchtitan's default is another:": [f"{k} = {shown(self.ours[k])}" for k in self.defaults],
            "Is so in Rowhouse anyway:": self.anyway,
        }
        lines = [f"{self.source}: read as torchtitan {self.version}'s, {len(self.given)} keys"]
        for heading, entries in groups.items():
            if entries:
                lines += [heading, *(f"  {entry}" for entry in entries)]
        return "\n".join([*lines, "In any case initial weights, and the order of the data, are Rowhouse's own."])


def read(path: Path) -> dict[str, Any]:
    """The file's keys, flat. Raises UserError where it cannot be read, is not torchtitan's, or has wrong types."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): give a file that can") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
    given = dict(flatten(content, ""))
    if keys.KNOWN.isdisjoint(given):
        raise UserError(f"{path}: has no key of torchtitan's: give a TOML of its versions 0.1 or 0.2")
    problems = []
    for key, value in given.items():
        try:
            # No clipping is not a number to Rowhouse.
            if (key in SAME or key in RENAMED or key in TRANSLATED) and (key, value) != ("training.max_norm", math.inf):
                check_value(value, keys.kind_of(key))
        except ValueError as error:
            problems.append(Problem(str(path), key, str(error)))
    if problems:
        raise SettingsError(problems)
    return given


def flatten(content: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def check(translation: Translation, text: str) -> None:
    """Raises SettingsError where train.py would not take the text on the fewest ranks that it allows."""
    names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
    degrees = [translation.ours.get(f"parallelism.{name}_degree", 1) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ours.toml")
        path.write_text(text)
        try:
            load_config(["--config", str(path)], math.prod(max(1, degree) for degree in degrees))
        except SettingsError as error:
            raise SettingsError([replace(p, place=str(translation.source)) for p in error.problems]) from error


def main() -> int:
    parser = argparse.ArgumentParser(prog="import_torchtitan", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", metavar="FILE", type=Path, help="a TOML of torchtitan 0.1 or 0.2")
    parser.add_argument("--output", metavar="OUT", type=Path, help="the TOML to write (default: to stdout)")
    args = parser.parse_args()
    try:
        if args.output is not None and args.output.exists():
            raise UserError(f"--output: there is a {args.output} already: remove it, or give another name")
        translation = Translation(args.file, read(args.file))
        text = translation.toml()
        check(translation, text)
        if args.output is None:
            print(text, end="")
        else:
            args.output.write_text(text)
    except UserError as error:
        print(f"import_torchtitan: {error}", file=sys.stderr)
        return ExitStatus.USER_ERROR
    except OSError as error:
        print(f"import_torchtitan: --output: {args.output} cannot be written ({error.strerror})", file=sys.stderr)
        return ExitStatus.USER_ERROR
    print(translation.report(), file=sys.stderr)
    return 1 if any(told.matters for told in translation.told) else 0


if __name__ == "__main__":
    sys.exit(main())
