"""The benchmark's own arithmetic; speed is for those who run it."""

import json

import pytest

from scripts import bench, bench_torchtitan

LOG = """
[titan] 2026-12-02 - root - INFO - step:  1  loss: 12.2461  grad_norm:  3.1  memory: 60.10GiB(43.00%)  tps: 1,638  tflops: 1
[titan] 2026-12-02 - root - INFO - step:  4  loss: 11.0000  grad_norm:  3.1  memory: 77.00GiB(55.00%)  tps: 9,000  tflops: 1
[titan] 2026-12-02 - root - INFO - step:  8  loss: 10.0000  grad_norm:  3.1  memory: 77.00GiB(55.00%)  tps: 22,440  tflops: 1
[titan] 2026-12-02 - root - INFO - step: 12  loss:  9.5000  grad_norm:  3.1  memory: 77.00GiB(55.00%)  tps: 22,500  tflops: 1
[titan] 2026-12-02 - root - INFO - step: 16  loss:  8.9000  grad_norm:  3.1  memory: 77.00GiB(55.00%)  tps: 22,400  tflops: 1
[titan] 2026-12-02 - root - INFO - step: 20  loss:  7.0000  grad_norm:  3.1  memory: 99.00GiB(55.00%)  tps: 11,111  tflops: 1
"""  # noqa: E501


def test_torchtitans_log_is_read():
    """But for its last line, of steps that are there to be profiled."""
    assert bench_torchtitan.result_of(LOG) == {
        "tokens_per_second": 22440, "range": [22400, 22500], "gib": 77.0,
        "first_step_seconds": pytest.approx(10.0, rel=0.01), "loss": 8.9
    }  # fmt: skip
    assert bench_torchtitan.result_of(LOG, batch=1)["first_step_seconds"] == pytest.approx(5.0, rel=0.01)


def test_a_run_and_its_table(tmp_path, capsys, monkeypatch):
    small = "--config debug.toml --model.n_layers 1 --training.seq_len 32 --training.global_batch_size 4"
    argv = ["bench", "--case", f"small={small}", "--json", str(tmp_path / "x.json"), "--repeats", "2"]
    monkeypatch.setattr("sys.argv", argv)
    assert bench.main() == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| small | ")
    runs = json.loads((tmp_path / "x.json").read_text())["small"]
    assert len(runs) == 2 and all(run["tokens_per_second"] > 0 and 0 < run["loss"] < 9 for run in runs)


def test_unknown_cases_and_no_gpu_are_told(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", "--cases", "wide-bf17"])
    assert bench.main() == 2 and "there is no case wide-bf17; there are wide-bf16" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench"])
    assert bench.main() == 0 and "nothing can be measured" in capsys.readouterr().out
