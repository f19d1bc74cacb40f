"""`bridge-fgo plan --recommend`: the settings with which a job fits a system, and the fastest of them."""

import math
import shlex
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from bridge_fgo.bridge.refusals import setting_refusals, uses_fsdp
from bridge_fgo.config import OffloadConfig
from bridge_fgo.offload.advice import MORE_GIB
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.job.parallel import goes_with
from bridge_fgo.tools.job.recomputation import OFFLOADED, kinds, told
from bridge_fgo.tools.plan.activations import adapters_of, copied_bytes, is_unfused, offload_modules, uncounted
from bridge_fgo.tools.plan.compute import ACHIEVED, Compute, compute_of
from bridge_fgo.tools.plan.estimate import Estimate, make_estimate, not_counted
from bridge_fgo.tools.plan.state import states_of_ranks
from bridge_fgo.tools.plan.systems import SYSTEMS, Link
from bridge_fgo.tools.plan.verdict import close_call

BUDGET = "optimizer.offload.gpu_memory_budget_gib="
FLAG_ON, FLAG_OFF = "optimizer.offload_optimizer_states=true", "optimizer.offload_optimizer_states=false"
HYBRID_SECONDS = 0.969 / 1.641e9
"""Seconds that HybridDeviceOptimizer adds to a step for each parameter that a rank updates: in one run on an H200,
with 16 cores, 1.470 s against 0.501 s resident at 1.641 billion parameters (`tests/harness/README.md`). Where
several GPUs share a host, as many times that as one of them copies slower than alone: both use the host's memory."""
AGAIN = " recomputed"
"""The names of kinds of recomputation end with this."""
TIE = 0.03
"""A share of a step by which estimates do not tell ways apart: activation offload took up to as much more in runs."""
HYBRID_HOST_BYTES = 16
"""Bytes of host memory of it a parameter: masters, two moments and the gradient in fp32."""


@dataclass(frozen=True)
class Choice:
    """One way to run the job, and the overrides of Bridge's config that have it run so.

    peak: bytes of the fullest rank. offloaded: bytes that leave the GPU of the rank that offloads the most, of states
    and of a microbatch's activations. step: seconds of a step by the terms. fits: whether the peak is within the
    system's room. close: see `close_call`. rate: tokens a second of one of the `gpus`.
    """

    name: str
    overrides: tuple[str, ...]
    peak: int
    offloaded: int
    step: float
    fits: bool
    gpus: int
    rate: float
    close: str = ""


@dataclass(frozen=True)
class Recommendation:
    """The ways to run a job on a system.

    choices: the first is the config as it is, with all on the GPU. advised: see `advised_of`. terms: what the times are
    made of. room: bytes that a peak may have. fewest: the way that fits on the fewest GPUs, with the same layout but
    for data parallelism; None if none does, or that is not known. command: that checks what is advised, or
    else the fewest.
    """

    choices: list[Choice]
    advised: Choice | None
    terms: list[str]
    room: int
    fewest: Choice | None = None
    command: str = ""

    def change(self, choice: Choice) -> float:
        """Return by what share a step is longer than that of the config as it is, with all on the GPU."""
        return choice.step / self.choices[0].step - 1

    @property
    def sentence(self) -> str:
        """The advice in one sentence, with the settings to write."""
        if self.advised is None and self.fewest is not None:
            return f"Recommended: {self.fewest.name}; nothing fits on {self.choices[0].gpus}"
        if self.advised is None:
            return "Recommended: more GPUs, or more tensor or pipeline parallelism; nothing fits as it is laid out"
        if self.advised is self.choices[0]:
            what = "as configured; nothing needs to leave the GPU"
            return ": ".join(("Recommended", what, *self.advised.overrides))  # which unset the flag
        change, settings = self.change(self.advised), shlex.join(self.advised.overrides)
        faster = f"{abs(change):.0%} {'faster' if change < 0 else 'slower'} than resident"
        if not self.choices[0].fits:
            faster += ", which does not fit"
        return ": ".join(("Recommended", f"{self.advised.name} ({faster})", *filter(None, [settings])))


def advised_of(choices: list[Choice]) -> Choice | None:
    """Return of the ways that fit, and that are about as fast as the fastest, the one that changes the fewest settings.

    Not counted is how much of the states is offloaded: what less copying saves, an estimate does tell.
    """
    fitting = [choice for choice in choices if choice.fits]
    fastest = min((choice.step for choice in fitting), default=0.0)
    as_fast = [choice for choice in fitting if choice.step <= fastest * (1 + TIE)]

    def order(choice: Choice) -> tuple[float, ...]:
        settings = [each for each in choice.overrides if not each.startswith((BUDGET, FLAG_ON, FLAG_OFF))]
        return len(settings), choice.step, choice.offloaded

    return min(as_fast, key=order, default=None)


class Recommender:
    """Makes estimates of a job with some settings changed, on one system.

    Its arguments are those of `make_estimate`; what the config recomputes is part of `backward`.

    Raises:
        ValueError: activations are not known, or the backward is shorter than what it recomputes.
    """

    def __init__(
        self,
        job: Job,
        link: Link,
        forward: float | None = None,
        backward: float | None = None,
        activations: int | None = None,
        room: int | None = None,
    ) -> None:
        self._job, self._link, self._activations = job, link, activations
        self._forward, self._backward = forward, backward
        if adapters := adapters_of(job.config):
            raise ValueError(
                f"--recommend: peft={adapters}: how long a backward with frozen parameters takes is not known"
            )
        self._again = compute_of(job, link.name, forward).recomputed
        if backward is not None and backward <= self._again:
            raise ValueError(
                f"--backward-seconds {backward}: what the config recomputes takes {self._again:.3f} s of it; give the "
                "whole backward, or leave it out"
            )
        self._of_host, self._room = SYSTEMS[link.name].host_bytes, room or SYSTEMS[link.name].room
        self._unset = (FLAG_OFF,) if job.flag else ()
        self._offload = replace(job.offload, fraction=1.0, gpu_memory_budget_gib=None)
        self._states = states_of_ranks(job, self._offload, min(link.gpus, job.parallel.gpus))
        self._as_it_is = self._estimate(job, everything=True)
        if not self._as_it_is.knows_activations:
            raise ValueError(f"--recommend: {not_counted(job.config)}; give --activations-gb")
        self._in_node = self._as_it_is.links[0].link  # beside the other GPUs of the node
        self._gpus_of_node = min(link.gpus, job.parallel.gpus)
        self._hybrid_seconds = HYBRID_SECONDS * link.one_way / self._in_node.one_way

    def recommend(self) -> Recommendation:
        """Return the ways to run the job, and the one to take."""
        choices: list[Choice] = []
        kinds, left_out = self._recomputations()
        terms = [*self._terms(self._compute(self._job), kinds)]
        answers = {name: self._job.recomputations.get(name, []) for name in kinds}
        refused = {name: why for name, why in answers.items() if isinstance(why, str)}
        for name, changes in {"as configured": {}, **kinds}.items():
            if name in refused:
                left_out[name] = f"Megatron-Bridge refuses it here: {refused[name]}"
                continue
            job = with_settings(self._job, model=changes)
            if self._activations is None and uncounted(job.config):
                left_out[name] = not_counted(job.config)
                continue
            if name in ("as configured", OFFLOADED):
                terms += self._terms_of_copies(job)
            overrides = (*told(self._job.config.model, changes), *answers.get(name, ()))
            resident, found = self._way(name, job, overrides), []
            is_as_it_is = not changes
            if is_as_it_is or resident.fits:
                found.append(resident)
            if is_as_it_is or not resident.fits:
                found += self._offloaded(name, job, overrides, also_everything=is_as_it_is)
            if not found:
                left_out[name] = "it does not fit, nor with the offload"
            choices += found
        advised = advised_of(choices)
        choices += [*self._larger_micro_batch(), *self._hybrid()]
        on_others, fewest = self._on_other_gpus(choices)
        choices += on_others
        terms += [f"not offered: {name}: {why}" for name, why in left_out.items()]
        return Recommendation(choices, advised, terms, self._room, fewest)

    def _estimate(
        self, job: Job, everything: bool, compute: Compute | None = None, offload: OffloadConfig | None = None
    ) -> Estimate:
        budget = None if everything else self._room / 2**30
        offload = replace(offload or self._offload, gpu_memory_budget_gib=budget)
        times = (None, None) if compute is None else (compute.forward, compute.backward)
        return make_estimate(job, offload, [self._link], *times, self._activations, self._states)

    def _compute(self, job: Job) -> Compute:
        # The given seconds are of the config's own microbatch.
        times = job.config.train.micro_batch_size / self._job.config.train.micro_batch_size
        forward = None if self._forward is None else self._forward * times
        backward = None if self._backward is None else (self._backward - self._again) * times
        copied, compute = _copied(job), compute_of(job, self._link.name, forward, backward)
        return replace(compute, copies=tuple((size / self._in_node.d2h, size / self._in_node.h2d) for size in copied))

    def _way(
        self,
        name: str,
        job: Job,
        overrides: tuple[str, ...],
        offload: OffloadConfig | None = None,
        everything: bool = True,
    ) -> Choice:
        """Return a way to run a job: resident, or with an offload of everything or of the least that fits."""
        compute, away = self._compute(job), sum(_copied(job))
        step = compute.step
        if offload is None:
            estimate = self._estimate(job, everything=True)
            pinned = max(stage.copies for stage in estimate.stages) * self._gpus_of_node
            peak = least = estimate.resident_peak
            settings = self._unset
        else:
            estimate = self._estimate(job, everything, _beside(compute), offload)
            away += max(stage.away + stage.moving for stage in estimate.stages)
            (row,) = estimate.links
            pinned, peak = row.pinned, estimate.offloaded_peak
            least = peak if everything else estimate.least_budget
            step += row.floor or 0.0
            # The config's own fraction and budget are not those of this choice.
            settings = () if self._job.flag else (FLAG_ON,)
            settings += () if self._job.offload.fraction == 1.0 else ("optimizer.offload.fraction=null",)
            has_other = everything and self._job.offload.gpu_memory_budget_gib is not None
            settings += (f"{BUDGET}null",) if has_other else ()
        close = close_call(estimate, self._room, least)
        return self._choice(name, (*settings, *overrides), peak, away, step, pinned, close)

    def _choice(
        self, name: str, overrides: tuple[str, ...], peak: int, away: int, step: float, pinned: int, close: str = ""
    ) -> Choice:
        """Return a choice; pinned: bytes of a node."""
        config, gpus = self._job.config, self._job.parallel.gpus
        rate = config.train.global_batch_size * config.model.seq_length / step / gpus
        fits = peak <= self._room and pinned <= self._of_host
        return Choice(name, overrides, peak, away, step, fits, gpus, rate, close)

    def _offloaded(self, name: str, job: Job, overrides: tuple[str, ...], also_everything: bool) -> Iterator[Choice]:
        """Yield the least offload that fits, where there is one, and the whole; both with gradients too."""
        ways = [(name, self._offload, overrides)]
        moved = _with_gradients(self._offload, job)
        if not self._why_gradients_stay(job, moved):
            word, value = ("lazy", "lazy") if moved.gradients == "lazy" else ("offloaded", "true")
            ways.append((f"{name}, gradients {word}", moved, (f"optimizer.offload.gradients={value}", *overrides)))
        are_states_enough = False
        for name, offload, overrides in ways:
            whole = self._estimate(job, everything=True, offload=offload)
            if whole.refusals:
                return
            fits = whole.least_budget <= self._room
            # Under a budget states leave first: where gradients that are copied have to, everything does.
            is_last = offload is moved and moved.gradients is True
            if fits and self._room < whole.resident_peak and not is_last:
                settings = (f"{BUDGET}auto", *overrides)
                yield self._way(f"{name}, least offload", job, settings, offload, everything=False)
            if also_everything or (is_last and fits and not are_states_enough):
                yield self._way(f"{name}, all offloaded", job, overrides, offload)
            are_states_enough = fits

    def _why_gradients_stay(self, job: Job, moved: OffloadConfig) -> str:
        """Return why gradients are not among what is compared; "" if they are."""
        if self._offload.gradients:
            return f"OffloadConfig.gradients={self._offload.gradients!r} is part of every way with the offload"
        if refusal := next(iter(setting_refusals(job.config, moved)), ""):
            return f"not offered: {refusal}"
        whole = self._estimate(job, everything=True, offload=moved)
        if not any(stage.spared for stage in whole.stages):
            return f"not offered: OffloadConfig.gradients={moved.gradients!r} takes nothing off the peak"
        (row,), backward = whole.links, self._compute(job).whole_backward
        if row.gradient_seconds > backward:
            return (
                f"not offered: after each microbatch {max(stage.moving for stage in whole.stages) / 1e9:.2f} GB would "
                f"take {row.gradient_seconds:.3f} s each way, longer than a backward of {backward:.3f} s hides; "
                "optimizer.offload.gradients=true has this job planned with them"
            )
        return ""

    def _on_other_gpus(self, choices: list[Choice]) -> tuple[list[Choice], Choice | None]:
        """Return the ways on the fewest GPUs, resident and with the offload, that are not among the `choices`.

        Beside them the one on the fewest of all. Tensor, pipeline, context and expert parallelism and the global batch
        stay; none are looked for where data parallelism does not divide the states evenly.
        """
        config = self._job.config
        if config.optimizer.optimizer != "adam" or not config.optimizer.use_distributed_optimizer or uses_fsdp(config):
            return [], None
        known = {self._job.parallel.gpus: choices}

        def best(gpus: int, is_resident: bool) -> Choice | None:
            if gpus not in known:
                job = on_gpus(self._job, gpus)
                there = Recommender(job, self._link, self._forward, self._backward, self._activations, self._room)
                name = f"{gpus} GPUs"
                offloaded = there._offloaded(name, job, (), also_everything=True)
                known[gpus] = [there._way(name, job, ()), *offloaded]
            resident, *others = known[gpus]
            ways = [resident, *(way for way in others if way.name.startswith(resident.name) and not is_resident)]
            return min((way for way in ways if way.fits), key=lambda way: way.step, default=None)

        parallel, train = self._job.parallel, config.train
        most = parallel.gpus // parallel.data * (train.global_batch_size // train.micro_batch_size)
        counts = [gpus for gpus in range(1, 1 + most) if goes_with(gpus, parallel, config)]
        found = []
        for is_resident in (True, False):
            place = bisect_left(counts, True, key=lambda gpus, only=is_resident: best(gpus, only) is not None)
            found += [best(gpus, is_resident) for gpus in counts[place : place + 1]]
        fewest = min(found, key=lambda way: (way.gpus, way.step), default=None)
        return [way for way in dict.fromkeys(found) if way not in choices], fewest

    def _recomputations(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return kinds of recomputation, and activation offload, other than the config's own; and why some are not."""
        model = self._job.config.model
        is_of_experts = bool(getattr(model, "num_moe_experts", None))
        other = "MLP recomputed" if is_of_experts else "experts recomputed"  # there are none
        found = {name: kind for name, kind in kinds(model).items() if name != other and told(model, kind)}
        unsuited: dict[str, str] = {}
        if self._activations is not None:
            unsuited = dict.fromkeys(found, "activations are not counted, but as --activations-gb says")
        elif not is_unfused(model):
            unsuited["attention recomputed"] = "of fused attention it spares nothing"
        suited = {name: kind for name, kind in found.items() if name not in unsuited}
        return suited, {name: why for name, why in unsuited.items() if name in found}

    def _larger_micro_batch(self) -> Iterator[Choice]:
        """Yield the largest micro batch above the config's that fits with all offloaded, where there is one."""
        train = self._job.config.train
        of_replica = train.global_batch_size // self._job.parallel.data
        if self._activations is not None or self._as_it_is.refusals:
            return
        for size in range(of_replica, train.micro_batch_size, -1):
            if of_replica % size == 0:
                job = with_settings(self._job, train={"micro_batch_size": size})
                name, overrides = f"micro batch of {size}, all offloaded", (f"train.micro_batch_size={size}",)
                larger = self._way(name, job, overrides, self._offload)
                if larger.fits:
                    yield larger
                    return

    def _hybrid(self) -> Iterator[Choice]:
        """Yield mcore's HybridDeviceOptimizer, which is Adam and does not go with Megatron-FSDP."""
        if self._job.config.optimizer.optimizer != "adam" or uses_fsdp(self._job.config):
            return
        stages = self._as_it_is.stages
        offloaded = max(stage.states.total for stage in stages)
        updated = offloaded // 12
        yield self._choice(
            "HybridDeviceOptimizer",
            (*self._unset, "optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=1.0"),
            max(stage.fixed - stage.states.total + (stage.activations or 0) for stage in stages),
            offloaded,
            self._compute(self._job).step + self._hybrid_seconds * updated,
            HYBRID_HOST_BYTES * updated * self._gpus_of_node,
        )

    def _terms_of_copies(self, job: Job) -> Iterator[str]:
        """Yield what the copies of activations take, where there are any."""
        compute = self._compute(job)
        asked = ". Set NVTE_CPU_OFFLOAD_V1=1 in the environment" if offload_modules(job.config.model) else ""
        if copied := sum(_copied(job)):
            yield (
                f"activations offloaded: {copied / 1e9:.2f} GB a microbatch take {compute.out:.3f} s to the host and "
                f"{compute.back:.3f} s back. What its forward and backward do not hide, {compute.exposed:.3f} s, is "
                f"added, and states have less to hide behind (estimated: two jobs on an H200 took up to 3% more){asked}"
            )

    def _what_more_memory_saves(self, beside: Compute) -> Iterator[str]:
        """Yield the budgets some GiB above the least that the system has room for, and what each adds to a step."""
        least = self._as_it_is.least_budget / 2**30
        budgets = [gib for more in MORE_GIB if (gib := math.ceil(least) + more) * 2**30 <= self._room]
        if not budgets or self._as_it_is.refusals:
            return
        added = []
        for gib in budgets:
            offload, times = replace(self._offload, gpu_memory_budget_gib=gib), (beside.forward, beside.backward)
            (row,) = make_estimate(self._job, offload, [self._link], *times, self._activations, self._states).links
            added.append(f"{row.floor or 0.0:.3f} s with {BUDGET}{gib}")
        yield f"with more than the least memory ({least:.1f} GiB) they add at least {', '.join(added)}"

    def _terms(self, compute: Compute, kinds: dict[str, dict[str, Any]]) -> Iterator[str]:
        rate = SYSTEMS[self._link.name].flops
        source = (
            f"at {ACHIEVED:.0%} of {rate / 1e12:.0f} TFLOP/s (data sheet, dense BF16); give --forward-seconds"
            if self._forward is None
            else "as given"
        )
        yield (
            f"compute: {compute.steps_of_a_pipeline:g} microbatches of {compute.forward:.3f} s forward, "
            f"{compute.backward:.3f} s backward and {compute.recomputed:.3f} s recomputed, {source}"
        )
        beside, (row,) = _beside(compute), self._as_it_is.links
        (hidden,) = self._estimate(self._job, everything=True, compute=beside).links
        yield (
            f"states: all of them take {row.link_seconds:.3f} s one way. They add at least {hidden.floor or 0.0:.3f} s "
            f"(floor; with nothing to hide behind {row.most_floor:.3f} s) at {self._in_node.figures} GB/s D2H/H2D/both "
            "at once; in runs on H200s up to 0.15 of their one crossing came on top"
        )
        yield from self._what_more_memory_saves(beside)
        moved = _with_gradients(self._offload, self._job)
        if why := self._why_gradients_stay(self._job, moved):
            yield f"gradients: {why}"
        else:
            whole = self._estimate(self._job, everything=True, offload=moved)
            spared = max(stage.spared for stage in whole.stages)
            copied = "nothing is copied"
            if moving := max(stage.moving for stage in whole.stages):
                seconds = whole.links[0].gradient_seconds
                copied = f"{moving / 1e9:.2f} GB, {seconds:.3f} s each way after a microbatch, hide behind a backward"
            yield f"gradients: {moved.gradients!r} takes {spared / 1e9:.2f} GB off the peak; {copied}"
        again = {
            name.removesuffix(AGAIN): self._compute(with_settings(self._job, model=kind)).recomputed
            for name, kind in kinds.items()
            if name.endswith(AGAIN)
        }
        if again:
            yield "recomputed in each microbatch: " + ", ".join(f"{name} {again[name]:.3f} s" for name in again)
        yield (
            f"HybridDeviceOptimizer: {self._hybrid_seconds * 1e9:.2f} s for 10^9 parameters "
            f"({HYBRID_SECONDS * 1e9:.2f} s measured, alone on a host; beside other GPUs as much longer as copies take)"
        )
        yield (
            "not counted: communication and its overlap, CUDA graphs, the optimizer's update, how much faster larger "
            "kernels are"
        )


def _beside(compute: Compute) -> Compute:
    """Return what states hide behind: a backward with what it does again, less what activations take of the link."""
    free = compute.forward - compute.out, compute.whole_backward - compute.back
    return replace(compute, forward=max(0.0, free[0]), backward=max(0.0, free[1]))


def _with_gradients(offload: OffloadConfig, job: Job) -> OffloadConfig:
    """Return an offload with that of gradients that spares something with as many microbatches."""
    return replace(offload, gradients="lazy" if job.microbatches == 1 else True)


def _copied(job: Job) -> list[int]:
    """Return the bytes of a microbatch's activations that go to the host, by layer of the stage with the most."""
    return max((copied_bytes(job, stage) for stage in range(job.parallel.pipeline)), key=sum)


def on_gpus(job: Job, gpus: int) -> Job:
    """Return a job on another number of GPUs: each rank has as much more or less of the states as there are others.

    So it is with Adam under DistributedOptimizer, but for the padding of buckets.
    """
    parallel = replace(job.parallel, gpus=gpus)
    held = []
    for of_stage in job.held:
        sizes = [sum(numel for _, numel, *_ in of.bundles) for of in of_stage.optimizers]
        fullest = max(of_stage.ranks, key=lambda rank: sum(sizes[number] for number in rank))
        optimizers = [
            replace(of, bundles=[[kind, math.ceil(numel * job.parallel.gpus / gpus)] for kind, numel in of.bundles])
            for of in of_stage.optimizers
        ]
        held.append(replace(of_stage, optimizers=optimizers, ranks=[fullest] * parallel.stage_ranks))
    return replace(job, parallel=parallel, held=held)


def with_settings(job: Job, **sections: dict[str, Any]) -> Job:
    """Return a job with some settings of its config changed; the tensors do not depend on them."""
    config = SimpleNamespace(**vars(job.config))
    for name, changes in sections.items():
        setattr(config, name, SimpleNamespace(**vars(getattr(config, name)) | changes))
    return replace(job, config=config)
