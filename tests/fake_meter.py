"""A peak meter for the CPU: what a GPU would hold beside the slabs grows and shrinks with the model's points."""

from contextlib import nullcontext

from bridge_fgo.bridge import session
from bridge_fgo.engines import offloaded_source
from bridge_fgo.memory.meters import PeakMeter, StepClock
from bridge_fgo.offload import policy


class FakeMeter(PeakMeter):
    """Says that forward adds `activation` bytes at each of its points and backward takes them away again.

    The schedule's point is told from its index: with F forward points and as many backward points a microbatch,
    the i-th point of a microbatch stands at min(i, 2F - i) layers.
    """

    activation = 0
    step = 0
    forward_points = 1

    @property
    def works(self):
        return True

    @property
    def expands(self):
        return True

    def end_phase(self):
        return 0

    def end_interval(self):
        engines = [one.engine for one in session.all_sessions() if one.engine.name == "native" and one.engine.sources]
        schedule = engines[-1].schedule
        if schedule.recorder.in_step:
            others = self.step
        else:
            i = schedule._index % (2 * self.forward_points)
            others = self.activation * min(i, 2 * self.forward_points - i)
        return others + schedule.ledger.nbytes


def have_clocks_rest(set_attribute) -> None:
    """Have no `StepClock` ask CUDA for events. set_attribute: `setattr`, or a monkeypatch's."""
    set_attribute(StepClock, "measure", lambda clock: nullcontext())


def have_sessions_take_it(set_attribute) -> None:
    """Have sessions measure by it, and plan without margins. set_attribute: `setattr`, or a monkeypatch's."""
    set_attribute(session, "PeakMeter", FakeMeter)
    have_clocks_rest(set_attribute)
    set_attribute(offloaded_source, "MARGIN_PARTS", 0)
    set_attribute(policy, "MARGIN_SHARE", 0)
