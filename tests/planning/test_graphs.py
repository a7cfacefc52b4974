"""Graphs whose buffers can be counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from planning.graphs import Matmul, plan_graph

N = 256
M = N * N * 4  # Bytes of a matrix below.


def plan(function, *shapes, frees_inputs=False):
    inputs = [torch.empty(shape) for shape in shapes]
    return plan_graph(make_fx(function, tracing_mode="fake")(*inputs), frees_inputs)


SQUARE = (N, N)


def chain(x: Tensor) -> Tensor:
    return ((x + 1) * 2).exp().sin()


def between_matmuls(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu().sin() @ w


def read_twice(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).sin()
    return y @ w + y


def one_kernel_for_two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ w
    return h.sin() @ w, h.cos() @ w


def reduced(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    return (h - h.mean(dim=1, keepdim=True)) @ w


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (chain, M),  # One kernel, which writes its result.
        (between_matmuls, 2 * M),  # The elementwise result takes its input's place; then the last product.
        (read_twice, 2 * M),
        # x @ w, then both elementwise results, none in its place; then a product beside what is left.
        (one_kernel_for_two, 3 * M),
        (reduced, 2 * M),  # The mean lives beside one matrix; then product and operand.
    ],
)
def test_the_most_that_lives_at_once(function, most):
    shapes = [SQUARE] * function.__code__.co_argcount
    found = plan(function, *shapes).inside
    assert most <= found <= most + 2 * N * 4


def test_backward_lets_go_of_what_was_kept():
    def backward(primals_1: Tensor, kept: Tensor, other: Tensor) -> Tensor:
        return (kept @ primals_1) @ other

    graph = make_fx(backward, tracing_mode="fake")(*(torch.empty(SQUARE) for _ in range(3)))
    assert plan_graph(graph, frees_inputs=False).inside == 2 * M
    # `kept` is gone when the second product is made.
    assert plan_graph(graph, frees_inputs=True).inside == M


def test_work_and_traffic_of_a_graph():
    found = plan(between_matmuls, (64, 32), (32, 32))
    matmuls = [work for work in found.works if work.kind == "float32 matmul"]
    assert [work.flops for work in matmuls] == [2 * 64 * 32 * 32] * 2
    assert [work.nbytes for work in matmuls] == [4 * (64 * 32 + 32 * 32 + 64 * 32)] * 2
    (elementwise,) = (work for work in found.works if work.kind == "memory")
    assert elementwise.nbytes == 2 * 4 * 64 * 32
    assert found.sent == found.matmuls == []


def test_attention_is_counted_as_causal():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = plan(attend, *[(2, 4, 64, 16)] * 3)
    (attention,) = (work for work in found.works if work.kind == "attention")
    assert attention.flops == 2 * (2 * 64 * 64 * 16) * (2 * 4) / 2


@pytest.mark.parametrize(
    ("left", "right", "scaling"),
    [
        (((32, 64), (32, 1)), ((48, 64), (48, 1)), "row-wise"),
        (((32, 64), ()), ((48, 64), ()), "tensor-wise"),
        (((1, 32, 64), (32, 1)), ((48, 64), (48, 1)), "not aligned to 16"),
        (((32, 64), (1, 32)), ((48, 64), (48, 1)), "of shapes that do not match"),
        (((40, 64), (40, 1)), ((48, 64), (48, 1)), "not aligned to 16"),
    ],
)
def test_the_scaling_of_a_matmul(left, right, scaling):
    assert Matmul("scaled_mm", left, (right,)).scaling == scaling
