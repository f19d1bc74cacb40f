"""Distillation, LoRA and MXFP8's order of copies train bitwise as resident."""

from functools import partial

import cpu_model
import cpu_training
import pytest
from both import both, steps
from cpu_training import CpuTraining

pytestmark = pytest.mark.usefixtures("cpu_standins")

STEPS = 6


@pytest.fixture
def provided(monkeypatch):
    """Return a function that sets what becomes of a model: called with its provider and the module, returns another."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    original = GPTModelProvider.provide

    def set_change(change):
        monkeypatch.setattr(GPTModelProvider, "provide", lambda self, *a, **k: change(self, original(self, *a, **k)))

    return set_change


def assert_bitwise_equal(cls=CpuTraining, **options):
    """Resident and offloaded are equal, with every state off the GPU in every forward."""

    def trained(run):
        seen = steps(run, STEPS)
        assert len({grad_norm for _, grad_norm, *_ in seen}) == STEPS
        return seen

    both(trained, cls=cls, **options)


class Distillation(CpuTraining):
    """Trains by Bridge's loss function for ModelOpt's distillation, whose config mirrors settings to the teacher's."""

    def _loss(self, losses, **fault):
        from megatron.bridge.training.losses import masked_next_token_loss
        from megatron.bridge.training.post_training.distillation import loss_func_kd
        from megatron.core.utils import unwrap_model

        lm_loss = partial(masked_next_token_loss, self._loss_mask)
        return loss_func_kd(losses, self._loss_mask, lm_loss, unwrap_model(self.model[0]))

    def step(self):
        bound, calls = self.cfg.model.finalize_model_grads_func, []
        counted = partial(lambda *args, **kwargs: calls.append(len(args)) or bound(*args, **kwargs))
        self.cfg.model.finalize_model_grads_func = counted
        record = super().step()
        assert len(calls) == 1, "what was bound is called"
        for config in (self.cfg.model, self.cfg.model.teacher):
            assert config.finalize_model_grads_func is counted, "and is there again after the step"
        self.cfg.model.finalize_model_grads_func = bound
        return record


@pytest.mark.slow
def test_distillation_is_bitwise_equal(monkeypatch, provided):
    pytest.importorskip("modelopt.torch.distill", reason="needs nvidia-modelopt")
    from megatron.bridge.models.distillation_provider import DistillationProvider, convert_to_distillation_provider
    from megatron.bridge.training.post_training.distillation import ModelOptDistillConfig

    def make_config(options):
        cfg = cpu_model.make_config(options)
        convert_to_distillation_provider(cfg.model, cpu_model.make_config(options).model, ModelOptDistillConfig())
        return cfg

    def convert(provider, module):
        if not isinstance(provider, DistillationProvider):
            return module  # the teacher
        provider.teacher._pg_collection = provider._pg_collection
        return provider._convert_hook([module])[0]

    monkeypatch.setattr(cpu_training, "make_config", make_config)
    provided(convert)
    assert_bitwise_equal(Distillation)


def test_lora_is_bitwise_equal(monkeypatch, provided):
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.lora import LoRA

    monkeypatch.setattr(utils, "HAVE_TE", False)  # it stands in here, and has no layers to tell apart
    lora = LoRA(target_modules=["linear_qkv", "linear_proj"], dim=4, alpha=8)
    trainable = []

    def adapt(provider, module):
        module = lora(module, training=True)
        trainable.append([name for name, parameter in module.named_parameters() if parameter.requires_grad])
        return module

    provided(adapt)
    assert_bitwise_equal()
    assert trainable[0] and all("adapter" in name for name in trainable[0])


class StagingMasters(CpuTraining):
    """Has each pass stage the masters in the parameter buffer, as MXFP8 with a shared gradient buffer does."""

    staged = 0

    def _build(self):
        super()._build()
        self.cfg.optimizer.reuse_grad_buf_for_mxfp8_param_ag = True
        for distributed in self.optimizer.chained_optimizers:
            copy = distributed._copy_main_params_to_param_buffer
            distributed._copy_main_params_to_param_buffer = partial(self._stage, copy)

    def _stage(self, copy):
        StagingMasters.staged += 1
        copy()


def test_masters_are_staged_for_mxfp8_before_they_are_released():
    # The dtype of the weights needs hardware; the copy in every pass, and that it reads the masters, does not.
    options = {"overlap_grad_reduce": True, "overlap_param_gather": True, "rerun_steps": frozenset({3})}
    StagingMasters.staged = 0
    assert_bitwise_equal(StagingMasters, **options)
    assert StagingMasters.staged == 2 * (STEPS + 1)
