"""A small form of the matrix: what `python -m scripts.scale_shape_matrix` runs in full."""

import torch

from scripts.scale_shape_matrix import ALLOWED, Case, cases, judge, markdown, one_process, run

CPU = torch.device("cpu")
SMALL = [
    Case("bf16", "none", 1, 1),
    Case("rowwise", "selective op", 3, 1),
    Case("bf16", "full", 3, 2, True),
    Case("rowwise", "none", 5, 2, False),
    Case("rowwise", "full", 2, 2, True),
    Case("rowwise", "selective op", 3, 2, True),
    Case("rowwise", "selective layer", 3, 2, True),
    Case("rowwise_with_gw_hp", "full", 2, 2, True),
    Case("rowwise", "full", 2, 2, True, compiled=True),
    Case("rowwise", "full", 3, 2, True, dp=2),
    Case("bf16", "selective op", 3, 4, True),
]


def test_small_matrix() -> None:
    results, floors = run(SMALL, "cpu")
    assert [r.case for r in results if not r.ok] == []
    assert {r.case for r in results} == set(SMALL)
    table = markdown(results, floors)
    assert table.count("| ok |") == len(SMALL)
    assert "miss" not in table


def test_wrong_rows_missing_fusions_and_nan_are_misses() -> None:
    case = Case("rowwise", "none", 2, 2, True)
    found, planned = one_process(case, CPU, torch.bfloat16), "forward 4/4, backward 4/4"
    assert judge(case, found, planned, CPU).ok
    assert not judge(case, found, "forward 3/4, backward 4/4", CPU).ok
    swapped = {**found, "logits": found["logits"].roll(1, 0)}
    result = judge(case, swapped, planned, CPU)
    assert not result.ok
    assert result.worst == "logits"
    assert result.ratio > ALLOWED["rowwise"]
    not_a_number = {**found, "norm.weight gradient": found["norm.weight gradient"] * float("nan")}
    assert not judge(case, not_a_number, planned, CPU).ok


def test_the_matrix_is_whole() -> None:
    full = [c for c in cases(quick=False, cuda=False) if not c.compiled and c.dp == 1]
    # 3 recipes x 4 AC modes x 4 batches x (TP 1; TP 2 and 4 with async TP off and on)
    assert len(set(full)) == len(full) == 3 * 4 * 4 * 5
