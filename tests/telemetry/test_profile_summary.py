"""The summary of a profile: kinds by name, and that they add up."""

import pytest
import torch
import torch.nn.functional as F

from telemetry.kernel_kinds import kind_of, kind_of_operator
from telemetry.profile_summary import summarise


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NTT", "matmul"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", "matmul"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm90<...>>", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("fmha_cutlassB_bf16_aligned_128x64_k128_dropout_sm80", "attention"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("triton_red_fused__to_copy_abs_amax_clamp_0", "float8, norm, elementwise"),
        ("quantise_parts_kernel", "float8, norm, elementwise"),
        ("reduce_maxima_kernel", "float8, norm, elementwise"),
        ("rms_norm_backward_kernel", "float8, norm, elementwise"),
        ("swiglu_kernel", "float8, norm, elementwise"),
        ("triton_poi_fused_add_mul_3", "float8, norm, elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "float8, norm, elementwise"),
        ("multi_tensor_apply_kernel<..., FusedAdamMathFunctor<float, 4, ...>>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("something_else", "other"),
    ],
)
def test_the_kind_of_a_kernel(kernel, kind):
    assert kind_of(kernel) == kind


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["aten::mm"], "matmul"),
        (["rowhouse::quantise_rows", "aten::copy_"], "float8"),
        (["rowhouse::scaled_mm", "aten::_scaled_mm", "aten::copy_"], "matmul"),
        (["CompiledFunction", "aten::mm"], "matmul"),
        (["CompiledFunction"], "compiled"),
        (["rowhouse::matmul_scatter", "aten::mm"], "FSDP, communication"),
        (["Optimizer.step#AdamW.step", "aten::_fused_adamw_"], "optimizer"),
        (["aten::copy_"], "copies"),
        (["aten::exp"], "elementwise, norm, loss"),
        (["LossOfLinear"], "other"),
    ],
)
def test_the_kind_of_an_operator(names, kind):
    assert kind_of_operator(names) == kind


def test_a_profile_adds_up():
    a = torch.randn(256, 256)
    q = torch.randn(1, 2, 128, 16)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=2)
    with torch.profiler.profile(schedule=schedule, acc_events=True) as profile:
        for _ in range(3):
            (a @ a).exp()
            F.scaled_dot_product_attention(q, q, q)
            profile.step()
    summary = summarise(profile.events())
    assert summary.steps == 2 and summary.device == "cpu"
    assert {"matmul", "attention", "elementwise, norm, loss"} <= {k.kind for k in summary.kinds}
    assert sum(k.milliseconds for k in summary.kinds) == pytest.approx(summary.busy * summary.milliseconds)
    assert 0 < summary.busy <= 1
    matmul = next(k for k in summary.kinds if k.kind == "matmul")
    assert "aten::mm" in matmul.longest
    text = summary.text()
    assert all(f"\n  {k.kind} " in text for k in summary.kinds) and "aten::mm" in text
    assert summary.as_json()["kinds"][0]["kind"] == summary.kinds[0].kind


def test_no_step_is_told():
    with pytest.raises(ValueError, match="no step"):
        summarise([])
