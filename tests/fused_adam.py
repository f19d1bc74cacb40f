"""Adams that keep their books as Transformer Engine's FusedAdam does, for mcore on the CPU."""

import sys
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor


class FusedAdam(torch.optim.Optimizer):
    """Counts `step` in the param group, and has the moments alone in `state`.

    What mcore takes on the CPU, torch's AdamW, counts in the state of each parameter. mcore loads that count as one
    tensor that all parameters share, and of `fully_reshardable` checkpoints not at all (KeyError: 'step').
    """

    def __init__(self, params, **defaults):
        usual = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(params, usual | defaults)
        names = "exp_avg", "exp_avg_sq", "master_param"
        self.name_to_dtype_map = dict.fromkeys(names, torch.float32)

    counts_empty_groups = True
    """As from Transformer Engine 2.19 on; until 2.18 a group without parameters has no steps."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"] and not self.counts_empty_groups:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self.update(group, param)

    def update(self, group, param):
        state = self.state[param]
        if not state:
            state.update(exp_avg=zeros_like(param), exp_avg_sq=zeros_like(param))
        if param.grad is None:  # a shard of no elements under Megatron-FSDP
            return
        adam(group, param, param.grad, state["exp_avg"], state["exp_avg_sq"])


def zeros_like(param):
    """Make a state of a parameter; of a DTensor as Transformer Engine does, whose local shard is a view then."""
    if not isinstance(param, DTensor):
        return torch.zeros_like(param)
    zeros = torch.zeros_like(param._local_tensor)
    return DTensor.from_local(
        zeros, device_mesh=param.device_mesh, placements=param.placements, shape=param.size(), stride=param.stride()
    )


def adam(group, param, grad, exp_avg, exp_avg_sq):
    beta1, beta2 = group["betas"]
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    scale = (exp_avg_sq / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
    param.mul_(1 - group["lr"] * group["weight_decay"])
    param.addcdiv_(exp_avg, scale, value=-group["lr"] / (1 - beta1 ** group["step"]))


class PrecisionAwareAdam(FusedAdam):
    """Has masters of its own, moments of any dtype, and the methods by which mcore reads and writes them.

    With `store_param_remainders` it keeps the low 16 bits of a bf16 parameter's master alone; the parameter is the high
    ones, cut off and not rounded. A state in fp16 has one fp32 scale for the whole tensor, in `_scales`, so that its
    largest value is half of what fp16 holds.
    """

    def __init__(
        self,
        params,
        master_weights=False,
        use_decoupled_grad=False,
        store_param_remainders=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        **defaults,
    ):
        super().__init__(params, **defaults)
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self._scales = {}

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for param in group["params"]:
                param.decoupled_grad = None

    def _has_remainders(self, param, name):
        return self.store_param_remainders and name == "master_param" and param.dtype == torch.bfloat16

    def get_unscaled_state(self, param, name):
        value = self.state[param][name]
        if self._has_remainders(param, name):
            return value
        whole = value.float()
        return whole.mul_(self._scales[param][name]) if value.dtype == torch.float16 else whole

    def set_scaled_state(self, param, name, value):
        """Write a state. As Transformer Engine's, it divides `value` itself by the scale of a state in fp16."""
        remainders = self._has_remainders(param, name)
        assert value.dtype == (torch.int16 if remainders else torch.float32)
        state = self.state[param]
        if name not in state:
            state[name] = torch.empty_like(param, dtype=torch.int16 if remainders else self.name_to_dtype_map[name])
            if state[name].dtype == torch.float16:
                self._scales.setdefault(param, {})[name] = torch.ones(1, device=param.device)
        if state[name].dtype == torch.float16:
            scale = self._scales[param][name]
            least, most = value.aminmax()
            torch.div(torch.maximum(-least, most), torch.finfo(torch.float16).max / 2, out=scale)
            value.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))
        state[name].copy_(value)

    def initialize_state(self, param):
        for name in ("exp_avg", "exp_avg_sq"):
            self.set_scaled_state(param, name, torch.zeros_like(param, dtype=torch.float32))
        if self.master_weights and self._has_remainders(param, "master_param"):
            self.set_scaled_state(param, "master_param", torch.zeros_like(param, dtype=torch.int16))
        elif self.master_weights:
            self.set_scaled_state(param, "master_param", param.detach().clone().float())

    def update(self, group, param):
        state = self.state[param]
        if not state:
            self.initialize_state(param)
        grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
        if grad is None:
            return
        grad = grad.float()
        moments = [self.get_unscaled_state(param, name) for name in ("exp_avg", "exp_avg_sq")]
        if not self.master_weights:
            adam(group, param, grad, *moments)
        elif self._has_remainders(param, "master_param"):
            high, low = param.view(torch.int16), state["master_param"]
            master = ((high.int() << 16) | (low.int() & 0xFFFF)).view(torch.float32)
            adam(group, master, grad, *moments)
            high.copy_(master.view(torch.int32) >> 16)
            low.copy_(master.view(torch.int32).to(torch.int16))
        else:
            master = self.get_unscaled_state(param, "master_param")
            adam(group, master, grad, *moments)
            param.copy_(master)
            self.set_scaled_state(param, "master_param", master)
        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            self.set_scaled_state(param, name, moment)

    def state_dict(self):
        found = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        for index, state in found["state"].items():
            found["state"][index] = {name: self.get_unscaled_state(params[index], name) for name in state}
        return found

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        names = [name for group in state_dict["param_groups"] for name in group["params"]]  # or numbers
        params = dict(zip(names, (p for group in self.param_groups for p in group["params"]), strict=True))
        for name_of_param, state in state_dict["state"].items():
            param = params[name_of_param]
            self.state[param] = {}
            for name, value in state.items():
                whole = value if self._has_remainders(param, name) else value.float()
                self.set_scaled_state(param, name, whole)


def have_mcore_take_it(set_attribute, adam=FusedAdam):
    """Have mcore build this Adam, and treat it as Transformer Engine's.

    set_attribute: `setattr`, or a monkeypatch's.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from bridge_fgo.states import inner_step

    set_attribute(inner_step, "KNOWN", inner_step.KNOWN | {f"{__name__}.FusedAdam.step"})
    set_attribute(inner_step, "UPSTREAM", inner_step.UPSTREAM | {__name__})
    set_attribute(optimizer, "Adam", adam)
    set_attribute(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    set_attribute(distrib_optimizer, "Adam", adam)
    set_attribute(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    set_attribute(distrib_optimizer, "USING_TE_OPTIMIZER", True)


def have_mcore_make_it_precision_aware(patch):
    """Have mcore build `PrecisionAwareAdam`, and find Transformer Engine to be recent. patch: a MonkeyPatch."""
    from megatron.core import optimizer
    from megatron.core.optimizer import optimizer_config

    have_mcore_take_it(patch.setattr, PrecisionAwareAdam)
    for module in (optimizer, optimizer_config):
        patch.setattr(module, "is_te_min_version", lambda version: True)
    # Where the config looks for the arguments that it takes.
    patch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", SimpleNamespace(FusedAdam=PrecisionAwareAdam))
