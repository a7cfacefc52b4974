"""Embedding and head over a split vocabulary, tied or not, against the whole ones on one process."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from parallelisms.tensor_parallel import split_embedding
from scripts import scale_shape_matrix as matrix
from scripts.local_ranks import launch

TOKENS, VOCAB, DIM = 48, 64, 16


def check_embedding() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    whole, ids = nn.Embedding(VOCAB, DIM), torch.randint(VOCAB, (TOKENS,))
    split = nn.Embedding(VOCAB, DIM)
    split.load_state_dict(whole.state_dict())
    split_embedding(split, mesh)
    g = torch.randn(TOKENS, DIM)
    mine = slice(dist.get_rank() * TOKENS // 2, (dist.get_rank() + 1) * TOKENS // 2)
    out, exact = split(ids), whole(ids)
    assert torch.equal(out, exact[mine])
    out.backward(g[mine])
    exact.backward(g)
    assert isinstance(split.weight.grad, DTensor)
    torch.testing.assert_close(split.weight.grad.full_tensor(), whole.weight.grad, rtol=1e-6, atol=1e-6)


def check_tied_model(folder: Path) -> None:
    """A tied head under TP, float8 in all of the blocks and in the head."""
    matrix.SHAPE = dataclasses.replace(matrix.SHAPE, tie_embeddings=True)
    cpu = torch.device("cpu")
    for case in (matrix.Case("bf16", "full", 3, 2), matrix.Case("rowwise", "selective op", 3, 2)):
        found, fused = matrix.run_case(case, cpu)
        if dist.get_rank() == 0:
            result = matrix.judge(case, found, fused, cpu)
            assert "output.weight gradient" not in found
            assert result.ok, result
            (folder / case.recipe).touch()
        dist.barrier()


def everything(folder: Path) -> None:
    check_embedding()
    check_tied_model(folder)


def test_split_vocabulary(tmp_path: Path) -> None:
    launch(everything, 2, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"bf16", "rowwise"}
