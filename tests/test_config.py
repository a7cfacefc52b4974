"""The run's configuration: every shipped file loads, survives being written, and every impossible combination is named.

A problem names its place, its key and a remedy, and all of them are told at once.
"""

import re
from pathlib import Path

import pytest

from config import CONFIGS, JobConfig, find_config, load_config
from errors import UserError
from settings import SettingsError, write_toml

SHIPPED = sorted(path.name for path in CONFIGS.glob("*.toml"))
REMEDY = re.compile(
    r"\b(give|set|take|choose|change|lower|raise|remove|make|write|did you mean|say where|must be|the nearest|"
    r"it belongs to|the (degrees|components|backends|sections|keys|flags) )"
)


def ranks_of(name: str) -> list[int]:
    """The numbers of ranks in a file's first line, which reads `# 8 GPUs of 80 GB, or 1 of 141 GB: ...`."""
    first_line = (CONFIGS / name).read_text().splitlines()[0]
    return [int(n) for n in re.findall(r"\b(\d+)\b(?! GB)", first_line.split(":")[0])]


def problems(argv: list[str], ranks: int = 1) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_config(argv, ranks)
    for problem in caught.value.problems:
        assert REMEDY.search(problem.text), f"no remedy: {problem}"
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_loads_and_reads_back(name: str, tmp_path: Path) -> None:
    ranks = ranks_of(name)
    assert ranks, f"the first line of {name} does not say on how many ranks it runs"
    for world_size in ranks:
        config = load_config(["--config", name], world_size)
        write_toml(config, tmp_path / "resolved.toml")
        assert load_config(["--config", str(tmp_path / "resolved.toml")], world_size) == config


def test_what_a_flag_changed_reads_back(tmp_path: Path) -> None:
    flags = "--model.n_layers 1 --training.epochs 2 --training.seq_len=64 --optimizer.no_weight_decay= --compile.enable"
    config = load_config(["--config", "debug.toml", *flags.split()], 1)
    assert (config.model.n_layers, config.training.epochs, config.training.seq_len) == (1, 2, 64)
    assert config.optimizer.no_weight_decay == [] and config.compile.enable
    write_toml(config, tmp_path / "resolved.toml")
    assert load_config(["--config", str(tmp_path / "resolved.toml")], 1) == config
    without = load_config(["--config", str(tmp_path / "resolved.toml"), "--training.epochs", "none"], 1)
    assert without.training.epochs is None


def test_a_config_is_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("debug.toml") == find_config("debug") == CONFIGS / "debug.toml"
    assert find_config(str(CONFIGS / "debug.toml")) == CONFIGS / "debug.toml"
    (tmp_path / "debug.toml").write_text("")
    assert find_config("debug.toml").resolve() == tmp_path / "debug.toml"  # A file that is here comes first.
    assert find_config("debug") == CONFIGS / "debug.toml"
    with pytest.raises(UserError, match=r'--config: there is no file "debgu.toml".*did you mean "debug.toml"'):
        find_config("debgu.toml")
    with pytest.raises(UserError, match=r"the shipped configs are: .*debug.toml.*llama8b.toml"):
        find_config("xyzzy")


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--training.global_batch_size 12", "training.global_batch_size"),
        ("--training.global_batch_size 4", "training.global_batch_size"),
        ("--training.global_batch_size -2", "training.global_batch_size"),
        ("--training.local_batch_size 0", "training.local_batch_size"),
        ("--training.seq_len 0", "training.seq_len"),
        ("--training.steps 0 --lr_scheduler.warmup_steps 0", "training.steps"),
        ("--training.gc_freq 0", "training.gc_freq"),
        ("--training.epochs 0", "training.epochs"),
        ("--training.max_norm -1", "training.max_norm"),
        ("--training.dataset c5", "training.dataset"),
        ("--training.dataset text", "training.dataset_path"),
        ("--training.dataset_path /tmp", "training.dataset_path"),
        ("--validation.enable --validation.dataset text", "validation.dataset_path"),
        ("--validation.enable --validation.freq 0", "validation.freq"),
        ("--validation.enable --validation.steps 0", "validation.steps"),
        ("--activation_checkpoint.mode memory_budget", "activation_checkpoint.mode"),
        ("--activation_checkpoint.mode memory_budget --compile.enable --compile.components loss",
         "activation_checkpoint.mode"),
        ("--lr_scheduler.warmup_steps 10001", "lr_scheduler.warmup_steps"),
        ("--lr_scheduler.total_steps 100", "lr_scheduler.warmup_steps"),
        ("--lr_scheduler.decay_ratio 1.5", "lr_scheduler.decay_ratio"),
        ("--lr_scheduler.min_lr_factor -0.1", "lr_scheduler.min_lr_factor"),
        ("--training.enable_cpu_offload --optimizer.implementation fused", "optimizer.implementation"),
        ("--optimizer.beta1 1", "optimizer.beta1"),
        ("--optimizer.lr -1", "optimizer.lr"),
        ("--optimizer.lr nan", "optimizer.lr"),
        ("--float8.recipe_name tensorwise --float8.backend rowhouse", "float8.backend"),
        ("--float8.recipe_name rowise", "float8.recipe_name"),
        ("--compile.components modle", "compile.components"),
        ("--model.n_layers 0", "model.n_layers"),
        ("--model.vocab_size 0", "model.vocab_size"),
        ("--checkpoint.load_step 4", "checkpoint.load_step"),
        ("--metrics.log_freq 0", "metrics.log_freq"),
        ("--debug.layer_statistics_freq -1", "debug.layer_statistics_freq"),
        ("--profiling.profile_freq 2", "profiling.profile_freq"),
        ("--comm.train_timeout_seconds 0", "comm.train_timeout_seconds"),
    ],
)  # fmt: skip
def test_an_impossible_value_names_its_key(flags: str, key: str) -> None:
    assert {problem.split(": ")[1] for problem in problems(flags.split())} == {key}


@pytest.mark.parametrize(
    ("flags", "ranks", "key"),
    [
        ("--parallelism.data_parallel_replicate_degree 2", 1, "parallelism.data_parallel_replicate_degree"),
        ("--parallelism.data_parallel_replicate_degree 0", 2, "parallelism.data_parallel_replicate_degree"),
        ("--parallelism.data_parallel_replicate_degree 3", 4, "parallelism.data_parallel_replicate_degree"),
        ("--parallelism.data_parallel_shard_degree 3", 4, "parallelism.data_parallel_shard_degree"),
        ("--parallelism.data_parallel_shard_degree 0", 2, "parallelism.data_parallel_shard_degree"),
        ("--parallelism.tensor_parallel_degree 0", 2, "parallelism.tensor_parallel_degree"),
        ("--parallelism.tensor_parallel_degree 4", 2, "parallelism.tensor_parallel_degree"),
        ("--parallelism.tensor_parallel_degree 2", 3, "parallelism.tensor_parallel_degree"),
        ("--training.global_batch_size 24", 2, "training.global_batch_size"),
        # Eight key and value heads; a vocabulary that is odd; tokens that the scales' alignment does not divide.
        ("--parallelism.tensor_parallel_degree 16 --model.flavor 8B", 16, "parallelism.tensor_parallel_degree"),
        ("--parallelism.tensor_parallel_degree 2 --model.vocab_size 2049", 2, "parallelism.tensor_parallel_degree"),
        ("--parallelism.tensor_parallel_degree 2 --training.local_batch_size 1 --training.seq_len 48", 2,
         "training.local_batch_size"),
        ("--parallelism.tensor_parallel_degree 2 --training.seq_len 20 --validation.enable "
         "--validation.local_batch_size 1", 2, "validation.local_batch_size"),
        ("--parallelism.tensor_parallel_degree 2 --float8.recipe_name tensorwise", 2, "float8.recipe_name"),
        ("--parallelism.tensor_parallel_degree 2 --float8.recipe_name rowwise --float8.backend torchao", 2,
         "float8.recipe_name"),
        ("--parallelism.enable_async_tensor_parallel", 2, "parallelism.enable_async_tensor_parallel"),
        ("--parallelism.tensor_parallel_degree 2 --parallelism.async_tensor_parallel_strict", 2,
         "parallelism.async_tensor_parallel_strict"),
        # On one rank too, Rowhouse's float8 matmuls take tokens in multiples of 16.
        ("--float8.recipe_name rowwise --training.local_batch_size 1 --training.seq_len 40", 1,
         "training.local_batch_size"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_ranks_names_its_key(flags: str, ranks: int, key: str) -> None:
    assert {problem.split(": ")[1] for problem in problems(flags.split(), ranks)} == {key}


def test_the_batch_that_would_fit_is_named() -> None:
    (problem,) = problems(["--training.global_batch_size", "36", "--training.local_batch_size", "4"], ranks=4)
    assert problem == (
        "command line: training.global_batch_size: 36 is not a multiple of local_batch_size (4) x data parallel ranks "
        "(4) = 16; the nearest that is: 32"
    )
    load_config(["--training.global_batch_size", "32", "--training.local_batch_size", "4"], 4)


def test_degrees_that_fit_are_named() -> None:
    argv = ["--parallelism.tensor_parallel_degree", "3", "--model.vocab_size", "2049", "--training.seq_len", "192"]
    found = problems(argv, ranks=3)
    # debugmodel: 8 heads, 4 key and value heads, 768 feed-forward columns; 2049 = 3 x 683 can be split.
    assert [problem.split(": ", 2)[2].split(" cannot")[0] for problem in found] == ["8 heads", "4 key and value heads"]
    assert all(problem.endswith("this model takes the degrees 1") for problem in found)
    (problem,) = problems(["--parallelism.tensor_parallel_degree", "2", "--model.vocab_size", "2049"], ranks=2)
    assert problem.endswith("2049 vocabulary rows cannot be split over 2 ranks; this model takes the degrees 1, or set "
                            "model.vocab_size to 2050")  # fmt: skip
    load_config(["--parallelism.tensor_parallel_degree", "2", "--model.vocab_size", "2050"], 2)


def test_all_problems_are_told_at_once_each_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[training]\nsteps = "many"\nglobal_batch_size = 12\n[float8]\nrecipe_name = "rowwise"\n')
    argv = ["--config", str(path), "--optimizer.beta2", "2", "--metrics.log_frq", "1", "--training.dataset", "text"]
    found = problems(argv)
    assert {problem.rsplit(": ", 1)[0].split(";")[0] for problem in found} >= {
        f"{path}: training.steps",
        "command line: --metrics.log_frq",
        "command line: optimizer.beta2",
        "default: training.dataset_path",
    }
    assert any(problem.startswith(f"{path}: training.global_batch_size: 12 is not a multiple") for problem in found)
    assert len(found) == 5, found


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("[parallelism]\npipeline_parallel_degree = 2", "parallelism.pipeline_parallel_degree: unknown key"),
        ("[training]\ndata_parallel_shard_degree = 8", "it belongs to [parallelism]"),
        ("[optimizer]\nlearning_rate = 1e-3", "optimizer.learning_rate: unknown key"),
        ("[experimental]\nx = 1", "[experimental]: unknown section"),
        ("steps = 10", "steps"),
    ],
)
def test_a_key_that_is_not_supported_is_an_error(toml: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(toml)
    (found,) = problems(["--config", str(tmp_path / "run.toml")])
    assert found.startswith(f"{tmp_path / 'run.toml'}: ") and problem in found


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "--config is missing"),
        (["--config"], "--config: takes the path"),
        (["--config", "nowhere.toml"], "there is no file"),
    ],
)
def test_the_file_itself_is_asked_for(argv: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        load_config(argv, 1)


def test_a_torn_file_names_itself(tmp_path: Path) -> None:
    (tmp_path / "torn.toml").write_text("[training\nsteps = 1")
    with pytest.raises(UserError, match=r"torn.toml: not valid TOML: .*line 1"):
        load_config(["--config", str(tmp_path / "torn.toml")], 1)


def test_tensor_parallel_ranks_share_their_batch() -> None:
    config: JobConfig = load_config(["--parallelism.tensor_parallel_degree", "2", "--training.global_batch_size=16"], 4)
    assert config.training.lanes(2) == 16
    assert load_config(["--parallelism.tensor_parallel_degree", "2"], 4).training.lanes(2) == 16  # 2 ranks x 8


def test_config_is_given_once_in_either_form() -> None:
    assert load_config(["--config=debug"], 1) == load_config(["--config", "debug.toml"], 1)
    with pytest.raises(UserError, match="--config: given more than once"):
        load_config(["--config", "debug", "--config=debug_fp8"], 1)
