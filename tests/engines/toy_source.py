"""The smallest source of states: a torch module under AdamW, without Megatron."""

from functools import partial

from bridge_fgo.memory.state_tensor import Bundle, State
from bridge_fgo.states.inner_step import InnerStep
from bridge_fgo.states.source import Source


class TorchSource(Source):
    """The moments of a torch optimizer whose update is element by element."""

    def __init__(self, optimizer):
        self.optimizer, inner = optimizer, InnerStep(optimizer)
        self._stepping, self._kept_whole_by, self._update = inner.replaced, inner.kept_whole_by, inner.update

    device = property(lambda self: self.optimizer.param_groups[0]["params"][0].device)

    def states(self):
        return [self._of(param) for group in self.optimizer.param_groups for param in group["params"]]

    def _of(self, param):
        moments = [
            State("moment", name, param, param.dtype, partial(self._read, param, name), late=True)
            for name in ("exp_avg", "exp_avg_sq")
        ]
        return Bundle(param, moments)

    def _read(self, param, name):
        return self.optimizer.state.get(param, {}).get(name)

    def kept_whole_by(self):
        return self._kept_whole_by()

    def stepping(self, run, owners):
        return self._stepping(run, owners)

    def step(self, part):
        self._update(part)
