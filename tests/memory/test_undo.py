"""What an error leaves half done is undone."""

import pytest

from bridge_fgo.memory.undo import undo_on_error


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_after_any_error_every_step_runs_in_order_also_if_one_fails(error):
    ran = []

    def fails():
        ran.append("fails")
        raise OSError

    with undo_on_error(lambda: ran.append("no error")):
        pass
    with pytest.raises(error), undo_on_error(lambda: ran.append(1), lambda: ran.append(2)):
        raise error
    with pytest.raises(OSError) as caught, undo_on_error(fails, lambda: ran.append(3)):
        raise error
    assert ran == [1, 2, "fails", 3] and isinstance(caught.value.__context__, error)
