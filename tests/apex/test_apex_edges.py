"""Apex's metadata, extensions, private names and interfaces of 2019 are there for packages that use them.

Guards: apex/_metadata, apex/_gone, apex/apex_C, apex/amp_C, apex/fused_adam_cuda, apex/contrib/optimizers/*.
Guards: apex/optimizers/fp16_optimizer, apex/amp/rnn_compat, apex/amp/compat.
"""

import importlib
import importlib.metadata
import math

import pytest
import torch
from apex_training import state_of_a_new_process  # noqa: F401 - a fixture
from torch import nn

import amp_patch
import amp_patch.apex


@pytest.fixture
def apex():
    """The stand-in under its name."""
    with amp_patch.apex.install():
        import apex

        yield apex


# ---- what is imported, and what metadata says -----------------------------------------------------------------------


def test_metadata_is_there_while_the_whole_of_apex_is_served():
    with amp_patch.apex.install():
        assert importlib.metadata.version("apex") == "0.1"
        found = importlib.metadata.distribution("apex")
        assert found.metadata["Name"] == "apex" and found.files is None and not list(found.entry_points)
        assert "apex" in {one.metadata["Name"] for one in importlib.metadata.distributions()}
        assert importlib.metadata.version("torch").partition("+")[0] == torch.__version__.partition("+")[0]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")


def test_parts_are_imported_when_they_are_asked_for(apex):
    assert apex.contrib.optimizers.FP16_Optimizer is apex.optimizers.FP16_Optimizer
    assert apex.contrib.clip_grad.clip_grad_norm_ and "optimizers" in dir(apex.contrib)
    from apex.amp import __version__
    from apex.amp.compat import filter_attrs
    from apex.amp.frontend import O3, state_dict
    from apex.amp.rnn_compat import has_old_rnns
    from apex.amp.utils import is_fp_tensor
    from apex.contrib.optimizers.fused_adam import FusedAdam
    from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm

    assert FusedAdam is apex.contrib.optimizers.FusedAdam and state_dict is apex.amp.state_dict and O3 and __version__
    assert filter_attrs(torch, ["exp", "none"]) == ["exp"] and not has_old_rnns()
    assert is_fp_tensor([torch.ones(1)]) and not is_fp_tensor((torch.ones(1), 1))
    assert SyncBatchNorm is apex.parallel.SyncBatchNorm


# ---- extensions and the hand-driven step -----------------------------------------------------------------------------


def test_apex_c(apex):
    import apex_C

    tensors = [torch.arange(6.0).view(2, 3), torch.ones(()), torch.zeros(0)]
    flat = apex_C.flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 1]
    views = apex_C.unflatten(flat, tensors)
    assert all(map(torch.equal, views, tensors)) and views[0].untyped_storage() is not tensors[0].untyped_storage()
    flat.zero_()
    assert views[0].abs().sum() == 0


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("overflows_at", [None, 1])
def test_a_step_driven_by_hand(apex, level, overflows_at):
    """As NVIDIA's BERT does: gradients flattened, scaled again for the reduction, unscaled, judged, stepped on."""
    import amp_C
    import apex_C

    amp, history = apex.amp, []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = apex.optimizers.FusedLAMB(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**10
    overflow_buffer = torch.zeros(1, dtype=torch.int)
    for step in range(3):
        loss = model(torch.randn(3, 4)).float().square().mean()
        with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled_loss:
            scaled_loss.backward()
        scaler = amp._amp_state.loss_scalers[0]
        gradients = [one.grad for one in amp.master_params(optimizer) if one.grad is not None]
        before = [one.clone() for one in gradients]
        flat = torch.empty(sum(one.numel() for one in gradients), dtype=torch.float16)
        views = apex_C.unflatten(flat, gradients)
        overflow_buffer.zero_()
        amp_C.multi_tensor_scale(65536, overflow_buffer, [gradients, views], scaler.loss_scale())
        if step == overflows_at:
            flat[0] = float("inf")  # what another rank has sent
        overflow_buffer.zero_()
        amp_C.multi_tensor_scale(65536, overflow_buffer, [views, gradients], 1.0 / scaler.loss_scale())
        old, scaler._overflow_buf = scaler._overflow_buf, overflow_buffer
        had_overflow = scaler.update_scale()
        assert scaler._has_overflow is had_overflow
        scaler._overflow_buf = old
        if had_overflow == 0:
            for gradient, original in zip(gradients, before, strict=True):
                torch.testing.assert_close(gradient, original, rtol=1e-2, atol=1e-6)
            optimizer.step()
        history.append((had_overflow, scaler.loss_scale()))
        for parameter in (*model.parameters(), *amp.master_params(optimizer)):
            parameter.grad = None
    expected = [(step == overflows_at, 2.0 ** (10 if overflows_at is None or step < 1 else 9)) for step in range(3)]
    assert history == expected
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_the_flag_of_a_scaler_may_be_read_and_written(apex):
    scaler = apex.amp.scaler.LossScaler("dynamic", init_scale=64.0)
    assert scaler._overflow_buf.tolist() == [0] and scaler._overflow_buf is scaler._overflow_buf
    scaler.unscale([torch.tensor([float("inf")])], [torch.empty(1)], 64.0)
    assert scaler._overflow_buf.tolist() == [1] and scaler._has_overflow
    scaler.clear_overflow_state()
    assert scaler._overflow_buf.tolist() == [0] and not scaler._has_overflow
    scaler._has_overflow = True
    assert scaler.update_scale() and scaler.loss_scale() == 32.0 and scaler._has_overflow
    scaler.clear_overflow_state()
    assert not scaler.update_scale() and scaler.loss_scale() == 32.0


# ---- optimizers ------------------------------------------------------------------------------------------------------


def test_a_subclass_finds_the_kernels_and_a_flag(apex):
    """As fairseq's FusedAdamV2 does, which calls the kernel itself."""
    import amp_C

    optimizer = apex.optimizers.FusedAdam([nn.Parameter(torch.ones(2))])
    flag = optimizer._dummy_overflow_buf
    assert (flag.tolist(), flag.dtype, optimizer.adam_w_mode, optimizer.master_weights) == ([0], torch.int32, 1, False)
    assert optimizer.multi_tensor_adam is amp_C.multi_tensor_adam
    assert apex.optimizers.FusedLAMB.multi_tensor_lamb is amp_C.multi_tensor_lamb
    assert apex.optimizers.FusedLAMB.multi_tensor_l2norm is amp_C.multi_tensor_l2norm
    assert apex.optimizers.FusedSGD.multi_tensor_sgd is amp_C.multi_tensor_sgd


@pytest.mark.parametrize(("corrects", "clips"), [(True, 2.0), (False, 0.0)])
def test_fused_adam_of_2019(apex, corrects, clips):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5))
    value, m, v = parameter.detach().double(), torch.zeros(5).double(), torch.zeros(5).double()
    optimizer = apex.contrib.optimizers.FusedAdam(
        [parameter], 0.1, corrects, (0.9, 0.99), 1e-3, False, 0.1, max_grad_norm=clips
    )
    for step in range(1, 5):
        parameter.grad = torch.randn(5)
        given = parameter.grad.clone()
        g = given.double()
        if clips:
            g = g / max(1.0, (g.norm().item() + 1e-6) / clips)
        optimizer.step()
        assert torch.equal(parameter.grad, given)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        rate = 0.1 * (math.sqrt(1 - 0.99**step) / (1 - 0.9**step) if corrects else 1.0)
        value = value - rate * (m / (v.sqrt() + 1e-3) + 0.1 * value)
        torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-5, atol=1e-6)
    with pytest.raises(amp_patch.OptimizerError, match="eps_inside_sqrt"):
        apex.contrib.optimizers.FusedAdam([parameter], eps_inside_sqrt=True)


@pytest.mark.parametrize("updates_itself", [False, True])
def test_fp16_optimizer_of_2019(apex, updates_itself):
    """The loops of pytorch-pretrained-bert, and of OpenNMT-py, which unscales and clips by itself."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    model, reference = make().half(), make()
    inner = apex.optimizers.FusedAdam(model.parameters(), lr=0.01, bias_correction=False, max_grad_norm=1.0)
    optimizer = apex.optimizers.FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    optimizer.loss_scale = 2.0**8
    plain = apex.optimizers.FusedAdam(reference.parameters(), lr=0.01, bias_correction=False)
    for step in range(6):
        for micro in range(2):
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + micro)).half()
            loss = model(inputs).float().square().mean() * 8
            optimizer.backward(loss * float("inf") if step == 2 and micro == 0 else loss)
            if step != 2:
                (reference(inputs.float()).square().mean() * 8).backward()
        if updates_itself:
            optimizer.update_master_grads()
            optimizer.clip_master_grads(1.0)
        optimizer.step()
        assert optimizer.overflow is (step == 2)
        if step != 2:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    assert optimizer.loss_scale == 2.0**7
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.02, atol=0.005)


# ---- init after initialize --------------------------------------------------------------------------------------


class Loss:
    def compute(self, tensor):
        return tensor.dtype


def test_init_after_initialize_patches_what_was_registered_since(apex):
    """As ESPnet does for its CTC loss."""
    amp = apex.amp
    model = nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    low = model(torch.ones(1, 2))
    assert low.dtype is torch.float16 and Loss().compute(low) is torch.float16
    amp.register_float_function(Loss, "compute")
    handle = amp.init()
    assert Loss().compute(low) is torch.float32 and handle.is_active()
    assert amp.init().is_active() and model(torch.ones(1, 2)).dtype is torch.float16
    amp_patch.reset()
    assert Loss().compute(low) is torch.float16


def test_init_changes_nothing_where_functions_are_not_cast(apex):
    model = nn.Linear(2, 2)
    apex.amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    with pytest.warns(UserWarning, match="amp.init patches nothing"):
        assert not apex.amp.init().is_active()


def test_init_patches_whatever_initialize_did_before(apex):
    """A model that is gone leaves nothing behind, and what a handle took out is put back in for one that lives."""
    amp, linear = apex.amp, nn.functional.linear
    model = nn.Linear(2, 2)
    model.itself = [model]  # a cycle, which only the collector ends
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    del model
    handle = amp.init()
    assert handle.is_active() and nn.functional.linear is not linear
    handle._deactivate()
    model = nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    for _ in range(2):
        amp._amp_state.handle._deactivate()
        assert model(torch.ones(1, 2)).dtype is torch.float32 and nn.functional.linear is linear
        assert amp.init().is_active() and model(torch.ones(1, 2)).dtype is torch.float16
    amp_patch.reset()
    assert nn.functional.linear is linear


@pytest.mark.parametrize("scale", [None, 128.0])
def test_a_second_initialize_starts_the_loss_scales_anew(apex, scale):
    """Apex made its scalers then: models that are given later start as the first did."""
    amp, models = apex.amp, [nn.Linear(2, 2), nn.Linear(2, 2)]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", loss_scale=scale, num_losses=2, verbosity=0)
        first = amp.state_dict()
        assert [entry["loss_scale"] for entry in first.values()] == [scale or 2.0**16] * 2
        assert [entry["unskipped"] for entry in first.values()] == [0, 0]
        for scaler in amp._amp_state.loss_scalers:
            scaler._loss_scale, scaler._unskipped = 4.0, 7


# ---- the extension of 2019, which OpenNMT-py and fairseq call by themselves ------------------------------------------


@pytest.mark.parametrize(("corrects", "dtype"), [(1, torch.float16), (0, torch.float32)])
def test_fused_adam_cuda_is_the_fused_adam_of_2019(corrects, dtype):
    from amp_patch.apex.contrib.optimizers import FusedAdam

    generator = torch.Generator().manual_seed(0)
    p = torch.randn(5, 3, generator=generator)
    m, v, out = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p, dtype=dtype)
    twin = nn.Parameter(p.clone())
    optimizer = FusedAdam([twin], 0.01, bool(corrects), (0.9, 0.99), weight_decay=0.1)
    with amp_patch.apex.install():
        import fused_adam_cuda

        for step in range(1, 4):
            g = (torch.randn(5, 3, generator=generator) * 8).to(dtype)
            fused_adam_cuda.adam(p, out, m, v, g, 0.01, 0.9, 0.99, 1e-8, 8.0, step, 1, corrects, 0.1)
            twin.grad = g.float() / 8
            optimizer.step()
        with pytest.raises(amp_patch.OptimizerError, match="eps_inside_sqrt"):
            fused_adam_cuda.adam(p, out, m, v, g, 0.01, 0.9, 0.99, 1e-8, 8.0, 6, 0, 1, 0.1)
    torch.testing.assert_close(p, twin.detach())
    torch.testing.assert_close([m, v], [optimizer.state[twin][name] for name in ("exp_avg", "exp_avg_sq")])
    assert torch.equal(out, p.to(dtype))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fused_adam_cuda")
