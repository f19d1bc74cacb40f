"""Stands in for NCCL beside gloo: ranks suspend and resume its communicators together, and use none meanwhile."""

import torch

from bridge_fgo.sleep import nccl


class FakeNccl:
    """The NCCL backend of a process group of gloo's."""

    def __init__(self, fakes, group):
        self.fakes, self.group, self.name = fakes, group, group.group_desc
        self.is_suspended = False
        group.register_pre_hook(1, self._note_use)

    def memory_stats(self):
        return {"total": 3000, "suspend": 2000, "persist": 1000, "suspended": int(self.is_suspended)}

    def suspend(self):
        self._become(True)

    def resume(self):
        self._become(False)

    def _become(self, is_suspended):
        assert self.is_suspended != is_suspended, "NCCL calls it an invalid usage"
        self.fakes.before(self)
        # As NCCL, by its own means: the group's hooks are not called.
        self.group._get_backend(torch.device("cpu")).barrier().wait()
        self.fakes.after(self)
        self.is_suspended = is_suspended
        self.fakes.log.append((self.name, is_suspended))

    def _note_use(self, _):
        if self.is_suspended:
            self.fakes.used.append(self.name)


class Fakes:
    """NCCL of a process."""

    def __init__(self, set_attribute):
        """set_attribute: `setattr`, or a monkeypatch's."""
        self._made, self.log, self.used = {}, [], []
        """`log` lists suspensions (True) and resumptions in their order, `used` the groups used while suspended."""
        self.before = self.after = lambda fake: None
        """Called with what is suspended or resumed, before all its ranks have come to it, and after."""
        set_attribute(nccl, "_nccl_of", self._of)

    def _of(self, group):
        if group not in self._made:
            self._made[group] = FakeNccl(self, group)
        return self._made[group]

    def awake(self):
        """Return the groups that are not suspended."""
        return [group for group in torch.distributed.distributed_c10d._world.pg_map if not self._of(group).is_suspended]

    @property
    def are_suspended(self):
        """Whether all are but the default group; none where it is False."""
        awake, every = self.awake(), torch.distributed.distributed_c10d._world.pg_map
        assert torch.distributed.group.WORLD in awake and len(awake) in (1, len(every)) and len(every) > 5
        return len(awake) == 1
