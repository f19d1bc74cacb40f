"""After a death at any instruction a training goes on bitwise."""

import contextlib
import dataclasses
import os
import random
import threading
import time

import pytest
from crash_child import DROPOUT, End, Job, Kept, random_end, require_same, run, seen, survivors

from bridge_fgo.engines.kept_steps import HEAD, MAGIC, OWN, WARDS

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]

LOSSES = int(os.environ.get("CRASH_LOSSES", "3"))
"""Lost nodes of all trainings together."""
KILLS = int(os.environ.get("CRASH_KILLS", "12"))
"""Deaths of all trainings together: in CI so many."""
SEED = int(os.environ.get("CRASH_SEED", "0"))
EXPERTS = ("--experts", "4", "--no-grouped-experts")
WEIGHT_DECAY = (("optimizer.weight_decay", 0.2),)
EXPERT_BIAS = (("model.moe_router_enable_expert_bias", True), ("model.moe_router_score_function", "sigmoid"))
EVALUATIONS = (("validation.eval_interval", 2), ("validation.eval_iters", 1))
JOBS = {
    "one rank": Job(),
    "dropout, late copies": Job(changes=DROPOUT, is_late=7),
    "experts": Job(arm=EXPERTS, changes=EXPERT_BIAS),
    "DP, fused Adam": Job(ranks=2, is_fused=True),
    "background saves": Job(is_fused=True, arm=("--async-save", "--save-interval", "2", "--save", "{}/saved")),
    "TP, dropout": Job(ranks=2, arm=("--tp", "2"), changes=DROPOUT),
    "PP": Job(ranks=2, arm=("--pp", "2")),
    "PP, interleaved": Job(ranks=2, arm=("--pp", "2", "--vpp", "2", "--layers", "4")),
    "EP": Job(ranks=2, arm=("--ep", "2", *EXPERTS)),
    "DP, whole parameters": Job(ranks=2, arm=("--no-distributed",)),
    "Energon": Job(energon_workers=0, changes=DROPOUT),
    "DP, Energon with workers": Job(ranks=2, energon_workers=2),
    "Muon, evaluations": Job(arm=("--optimizer", "muon", "--no-distributed"), changes=(*DROPOUT, *EVALUATIONS)),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_training_that_dies_at_any_instruction_ends_bitwise_as_one_that_never_does(tmp_path, name):
    whole = dataclasses.replace(JOBS[name], folder=tmp_path / "whole")
    assert run(whole) == [0] * whole.ranks, seen(whole).logs
    deaths = KILLS // len(JOBS) + (list(JOBS).index(name) < KILLS % len(JOBS))
    survivors(dataclasses.replace(whole, folder=tmp_path), seen(whole), deaths, f"{name} {SEED}")


SAVES = ("--save-interval", "2", "--save")


@dataclasses.dataclass
class Case:
    """A training that is killed before a step, and what is other as it starts again, from the checkpoint of step 4."""

    line: str
    before: int = 5
    changes: dict = dataclasses.field(default_factory=dict)
    ranks: int = 1
    deaths: int = 1
    same: bool = True


CASES = {
    "changed config": Case("optimizer.weight_decay was 0.01 and is 0.2", changes={"changes": WEIGHT_DECAY}, same=False),
    "changed world": Case("ranks was 2 and is 1", changes={"ranks": 1}, ranks=2, same=False),
    "changed code": Case("bridge-fgo was '0.1.0' and is 'another'", changes={"other_code": True}),
    "newer checkpoint": Case("the checkpoint of step 4 is newer than the kept step 3", before=4),
    "poisoned step": Case("2 starts from step 4 have failed", deaths=3),
    "lost node": Case("rank 1 has none, as its node or its keeper was lost", ranks=2),
    "lost keeper": Case("Connection refused", changes={"keeper": "lost"}),
    "full keeper": Case("raise its --memory-gib", changes={"keeper": "full"}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_go_on_from_a_kept_step_is_a_line_and_loads_the_checkpoint(tmp_path, tmp_path_factory, name):
    case, unique = CASES[name], str(os.getpid())
    whole = tmp_path_factory.getbasetemp() / f"whole-{case.ranks}"
    plain = Job(whole, ranks=case.ranks, steps=7, is_fused=True)
    if not whole.exists():
        assert run(plain) == [0] * case.ranks
    changes = {name: f"{unique}.{each}" if name == "keeper" else each for name, each in case.changes.items()}
    with Kept(f"{unique}.0"), Kept(f"{unique}.full", limit=2**20):
        saved = str(tmp_path / "saved")
        arm = (*plain.arm, "--survive-crash", *SAVES, saved, "--load", saved)
        job = dataclasses.replace(plain, folder=tmp_path / "killed", keeper=f"{unique}.{{rank}}", tries=2, arm=arm)
        end = End(case.ranks - 1, step=case.before)
        with Kept(f"{unique}.1"):
            for _ in range(case.deaths):
                assert any(run(dataclasses.replace(job, end=end)))
        with Kept(f"{unique}.1"):  # of a node that replaces a lost one
            run(job := dataclasses.replace(job, **changes))
    found = seen(job)
    assert case.line in found.logs[0], found.logs[0][-3000:]
    assert "the newest checkpoint is loaded" in found.logs[0] or "since the newest checkpoint" in found.logs[0]
    assert found.of("begin")[-1]["step"] == 4 and found.of("end")
    if case.same:
        expected = {event["step"]: event["numbers"] for event in seen(plain).of("step")}
        assert all(event["numbers"] == expected[event["step"]] for event in found.of("step"))


EVERY = 2
TO_BUDDY = ("--survive-crash", "--copies-to-buddy-every", str(EVERY))
NODES = {
    "fast": Job(ranks=2, steps=10, is_fused=True),
    "slow copies": Job(ranks=2, steps=10, changes=DROPOUT, is_late=7, slow_copies=0.03),
    "PP": Job(ranks=2, steps=10, arm=("--pp", "2"), slow_copies=0.01),
}
"""Each of the ranks is a node."""


@pytest.mark.parametrize("name", NODES)
def test_after_the_loss_of_a_node_a_training_goes_on_bitwise_from_the_copies_of_its_buddy(tmp_path, name):
    plain, unique, generator = NODES[name], str(os.getpid()), random.Random(f"{name} {SEED}")
    whole = dataclasses.replace(plain, folder=tmp_path / "whole")
    assert run(whole) == [0, 0], seen(whole).logs
    arm = (*plain.arm, *TO_BUDDY)
    job = dataclasses.replace(plain, folder=tmp_path / "killed", keeper=f"{unique}.{{rank}}", arm=arm)
    losses = LOSSES // len(NODES) + (list(NODES).index(name) < LOSSES % len(NODES))
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(contextlib.ExitStack()) for _ in range(2)]
        keepers = [node.enter_context(Kept(f"{unique}.{rank}")) for rank, node in enumerate(nodes)]
        status, expected, begun, losses_of_steps = [1], 0, 0, []
        while any(status):
            status = run(dataclasses.replace(job, end=random_end(generator, 2, most_after=5) if losses > 0 else None))
            begins, steps = seen(job).of("begin"), [-1, *(event["step"] for event in seen(job).of("step"))]
            if len(begins) > begun:
                assert begins[-1]["step"] == expected, seen(job).logs[0][-3000:]
            assert losses > 0 or not any(status), seen(job).logs
            losses, lost = losses - 1, generator.randrange(2)
            expected = newest_at(keepers[1 - lost], 1 - lost) or 0
            if len(begins) > begun and steps[-1] - begins[-1]["step"] >= EVERY + 2 and any(status):
                losses_of_steps.append(steps[-1] + 1 - expected)
            begun = len(begins)
            nodes[lost].close()
            keepers[lost] = nodes[lost].enter_context(Kept(f"{unique}.{lost}"))  # of a node that replaces it
    require_same(seen(job), seen(whole), most_again=job.steps + 1)
    assert job.slow_copies or max(losses_of_steps, default=0) <= EVERY + 2, losses_of_steps


def newest_at(kept: Kept, rank: int) -> int | None:
    """Return the newest step that a node has of its own rank and of the other one."""
    files = [kept.keeper._files.get(f"{rank}/slot{slot}") for slot in (*OWN, *WARDS)]
    heads = [b"" if file is None else os.pread(file, HEAD.size, 0) for file in files]
    steps = [HEAD.unpack(head)[1] if head.startswith(MAGIC) else None for head in heads]
    return max({step for step in steps[: len(OWN)] if step in steps[len(OWN) :] and step is not None}, default=None)


def test_training_goes_on_as_the_keeper_of_a_buddy_is_lost(tmp_path):
    unique, (folder, whole) = str(os.getpid()), (tmp_path / "kept", Job(tmp_path / "whole", ranks=2, is_fused=True))
    job = dataclasses.replace(whole, folder=folder, keeper=f"{unique}.{{rank}}", arm=TO_BUDDY)
    assert run(whole) == [0, 0]
    with Kept(f"{unique}.0"), contextlib.ExitStack() as stack:
        stack.enter_context(Kept(f"{unique}.1"))

        def lose() -> None:
            while len(seen(job).of("step", 1)) < 3:
                time.sleep(0.05)
            stack.close()

        threading.Thread(target=lose, daemon=True).start()
        assert run(job) == [0, 0], seen(job).logs
    assert "the keeper has ended" in seen(job).logs[1]
    require_same(seen(job), seen(whole))


def test_copies_to_a_buddy_are_refused_where_all_ranks_are_of_one_node(tmp_path):
    with Kept(name := str(os.getpid())):
        job = Job(tmp_path, ranks=2, keeper=name, arm=TO_BUDDY)
        assert all(run(job))
    assert "ValueError: OffloadConfig.copies_to_buddy_every=2: it needs two nodes at least" in seen(job).logs[0]
    assert not seen(job).of("step")
