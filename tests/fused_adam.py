"""An Adam that keeps its books as Transformer Engine's FusedAdam does, for mcore on the CPU."""

import torch


class FusedAdam(torch.optim.Optimizer):
    """Counts `step` in the param group, and has the moments alone in `state`.

    What mcore takes on the CPU, torch's AdamW, counts in the state of each parameter. mcore loads that count as one
    tensor that all parameters share, and of `fully_reshardable` checkpoints not at all (KeyError: 'step').
    """

    def __init__(self, params, **defaults):
        super().__init__(params, {"lr": 1e-3, "bias_correction": True, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                scale = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - beta1 ** group["step"]))


def have_mcore_take_it(set_attribute):
    """Have mcore build this Adam, and treat it as Transformer Engine's.

    set_attribute: `setattr`, or a monkeypatch's.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    set_attribute(optimizer, "Adam", FusedAdam)
    set_attribute(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    set_attribute(distrib_optimizer, "Adam", FusedAdam)
    set_attribute(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    set_attribute(distrib_optimizer, "USING_TE_OPTIMIZER", True)
