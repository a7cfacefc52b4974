"""Writes docs/configuration.md from the configuration's dataclasses: python -m scripts.configuration_reference"""

from pathlib import Path

from config import JobConfig
from settings import markdown_reference

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m scripts.configuration_reference` (`make docs`) from the dataclasses; edit those. -->

A run is described by a TOML file; any key can be overridden on the command line:

```
torchrun --nproc-per-node 8 train.py --config llama8b_fp8.toml --training.seq_len 4096 --compile.enable false
```

Names are those of torchtitan 0.2's TOML wherever the meaning is the same. TOML has no null: where "none" is allowed,
write it as a string. A list on the command line: `--float8.filter_fqns output,wk` or separate words; a boolean flag
alone means true. Whatever is wrong is told at once, each with its place and its remedy, and the exit status is 2.

"""


def page() -> str:
    return INTRODUCTION + markdown_reference(JobConfig)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
