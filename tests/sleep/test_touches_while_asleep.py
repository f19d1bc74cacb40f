"""Use of an offloaded tensor is an error that names it."""

import contextlib
import copy
import io

import pytest
import torch
from both import SMALL

import bridge_fgo
from bridge_fgo.memory import guard

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")


@pytest.fixture(params=["addresses refused", "before PyTorch 2.12", "before PyTorch 2.12, installed"], autouse=True)
def layers(request, monkeypatch):
    """With the layer in PyTorch's storages, and without it; there also beside patches, which serve nothing asleep."""
    monkeypatch.setattr(guard, "_CAN_REFUSE", guard._CAN_REFUSE and request.param == "addresses refused")
    is_installed = request.param.endswith("installed")
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")) if is_installed else contextlib.nullcontext():
        yield


class Awake:
    """What somebody holds of a training since before the sleep."""

    def __init__(self, training, folder):
        self.training, self.folder = training, folder
        self.model, self.chunk = training.model[0].module, training.model[0]
        self.param = next(p for p in training.model[0].parameters() if p.requires_grad)
        self.master = self.param.main_param
        self.leaf = training.optimizer.chained_optimizers[0]
        self.moment = self.leaf.optimizer.state[self.leaf.optimizer.param_groups[0]["params"][0]]["exp_avg"]
        self.state_dict = self.model.state_dict()
        self.sharded = {name: each for name, each in self.model.sharded_state_dict().items() if hasattr(each, "data")}
        self.kept_view = self.param.data.view(-1)[1:]


def to_a_file(value):
    torch.save(value, io.BytesIO())


def sharded_save(held):
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(held.sharded, str(held.folder))


def safetensors_save(held):
    from safetensors.torch import save_file

    save_file({"w": held.param.data}, str(held.folder / "w.safetensors"))


USES = {
    "params": {
        "sum": lambda held: held.param.sum(),
        "copied_to_as_hugging_face_weights_are": lambda held: held.param.data.copy_(torch.zeros_like(held.param)),
        "deepcopy_of_the_model": lambda held: copy.deepcopy(held.model),
        "forward": lambda held: forward(held.training),
        "forward_of_the_model_inside": lambda held: held.model(None),
        "adapters_saved_as_skyrl_does": lambda held: to_a_file({n: p.data for n, p in held.model.named_parameters()}),
        "state_dict_is_saved": lambda held: to_a_file(held.chunk.state_dict()),
        "state_dict_of_a_layer_is_saved": lambda held: to_a_file(held.model.module.decoder.state_dict()),
        "state_dict_from_before_is_saved": lambda held: to_a_file(held.state_dict),
        "parameter_itself_is_saved": lambda held: to_a_file(held.param),
        "view_from_before": lambda held: held.kept_view.sum(),
        "sharded_state_dict_from_before_is_saved": sharded_save,
        "safetensors": safetensors_save,
        "to_the_cpu": lambda held: held.model.cpu(),
        "load_state_dict": lambda held: held.model.load_state_dict(held.state_dict, strict=False),
        "step": lambda held: held.training.optimizer.step(),
        "reload_model_params": lambda held: held.leaf.reload_model_params(),
        "start_param_sync": lambda held: held.chunk.start_param_sync(),
    },
    "grads": {
        "main_grad_zeroed": lambda held: held.param.main_grad.zero_(),
        "main_grad_read": lambda held: held.param.main_grad.norm(),
        "buffer_zeroed": lambda held: held.chunk.zero_grad_buffer(),
        "buffer_read": lambda held: held.chunk.buffers[0].grad_data.isnan().any(),
        "bucket_read": lambda held: held.chunk.buffers[0].buckets[0].grad_data.clone(),
        "start_grad_sync": lambda held: held.chunk.start_grad_sync(),
        "finish_grad_sync": lambda held: held.chunk.finish_grad_sync(),
        "scale_gradients": lambda held: held.chunk.scale_gradients(2.0),
    },
    "optimizer": {
        "master_read": lambda held: held.master.sum(),
        "moment_filled": lambda held: held.moment.fill_(1.0),
        "state_dict_of_adam_is_saved": lambda held: to_a_file(held.leaf.optimizer.state_dict()),
        "load_state_dict": lambda held: held.leaf.load_state_dict({}),
        "step_of_a_part": lambda held: held.leaf.step_with_ready_grads(),
        "save_parameter_state": lambda held: held.leaf.save_parameter_state(str(held.folder / "states")),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", USES)
def test_every_use_of_what_is_away_is_refused_by_name_and_training_goes_on(sleeper, kind, tmp_path):
    me = sleeper(early=True)
    res, held = me.res, Awake(me.training, tmp_path)
    for _ in range(2):
        res.offload()
        for name, use in USES[kind].items():
            with pytest.raises(RuntimeError, match=rf"(?s)reload\('{kind}'\)"):
                use(held)
                pytest.fail(f"{name} was not refused")
        res.reload()
        me.train()
    hung = [(held.chunk, "zero_grad_buffer"), (held.training.optimizer, "step"), (held.leaf, "load_state_dict")]
    assert all(name in vars(owner) for owner, name in hung)
    res.close()
    assert not any(name in vars(owner) for owner, name in hung)
    me.train()
    me.assert_as_resident()


def forward(training):
    length, vocab = SMALL["sequence"], SMALL["vocab"]
    tokens = torch.arange(length).view(1, length) % vocab
    mask = training._causal_mask[..., :length, :length]
    return training.model[0](tokens, training._positions[:, :length], mask, labels=tokens)


def forward_and_offload(training, res):
    with torch.random.fork_rng():  # of dropout
        losses = forward(training)
    res.offload("grads")
    losses.sum().backward()


def in_training(training, res):
    res.offload("grads")
    forward(training)


def in_eval(training, res):
    res.offload("grads")
    training.model[0].eval()
    try:
        forward(training).sum().backward()
    finally:
        training.model[0].train()


def in_only(training, res):
    training.model[0].eval()
    try:
        with res.only("params"):
            forward(training).sum().backward()
    finally:
        training.model[0].train()


@pytest.mark.parametrize("backward", [forward_and_offload, in_training, in_eval, in_only])
def test_a_backward_whose_gradients_are_away_raises_before_it_writes(sleeper, backward):
    me = sleeper(early=True)
    with pytest.raises(RuntimeError, match=r"reload\('grads'\)"):
        backward(me.training, me.res)
    me.res.reload()
    me.ddp.zero_grad_buffer()
    me.train(2)
    me.assert_as_resident()
