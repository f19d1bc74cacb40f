"""The compute time of a training step, by counting operations: what changes with recomputation and microbatches.

A forward does two operations for each weight and token, and attention four for each pair of tokens and each element
of a head; a backward does twice as many. They run at half of the data sheet's dense BF16 rate: in three runs of
`bridge-fgo bench` on H200s it was 41 to 54% (1.64 and 5.93 billion parameters, with two kinds of recomputation, once
the traffic of the score matrices was taken off). Unfused attention also passes over its score matrix in memory, 5
times forward and 7 times backward. Not counted: communication, the optimizer's own update, FP8.
"""

from dataclasses import dataclass, replace
from typing import Any

from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.job.recomputation import recomputed_modules
from bridge_fgo.tools.plan.activations import HALF, chunks_of, is_unfused, layers_of_stage, recomputation, tokens_of
from bridge_fgo.tools.plan.systems import SYSTEMS

ACHIEVED = 0.5
"""Share of the data sheet's rate; see above."""
FORWARD_PASSES, BACKWARD_PASSES = 5, 7
"""Times that unfused attention reads or writes its score matrix: product, scale and mask, softmax, product; the mask's
pass is counted as one. Backward their gradients too."""
RECOMPUTED_PARTS = {"mlp": ".mlp.", "moe": ".mlp.", "shared_experts": ".shared_experts.", "mla_up_proj": "_up_proj."}
"""By module that can be recomputed, a part of its weights' names. Other modules (norms, activations) cost little."""


@dataclass(frozen=True)
class Compute:
    """Seconds of one microbatch on the slowest stage's rank, and how many there are.

    recomputed: what its backward does again of the forward. steps_of_a_pipeline: microbatches, and as many more as the
    pipeline's stages wait to fill and drain it. in_layers: the share of forward and backward that layers take. copies:
    what those of each layer's activations take of the link, out and back.
    """

    forward: float
    backward: float
    recomputed: float
    steps_of_a_pipeline: float
    in_layers: float
    copies: tuple[tuple[float, float], ...] = ()

    @property
    def out(self) -> float:
        """Seconds of copies of a microbatch's activations to the host."""
        return sum(out for out, _ in self.copies)

    @property
    def back(self) -> float:
        """Seconds of the same copies back."""
        return sum(back for _, back in self.copies)

    @property
    def whole_backward(self) -> float:
        """Seconds of a microbatch's backward, with what it does again."""
        return self.backward + self.recomputed

    @property
    def exposed(self) -> float:
        """Seconds by which copies of activations make a microbatch longer.

        In each layer they begin, and are needed again, half-way: attention's earlier, experts' later. A layer is copied
        back from half-way through the backward of the layer behind it, by mcore 0.19.2's order of groups.
        """
        share = self.in_layers / max(1, len(self.copies))
        of_forward, of_backward = self.forward * share, self.whole_backward * share
        on_host, ended = [], 0.0
        for place, (out, _) in enumerate(self.copies):
            ended = max(ended, (place + 0.5) * of_forward) + out
            on_host.append(ended)
        now, waited = self.forward + self.whole_backward * (1 - self.in_layers), 0.0
        half_way = link = self.forward
        for (_, back), ended in zip(reversed(self.copies), reversed(on_host), strict=True):
            begun, half_way = half_way, now + of_backward / 2
            if back:
                link = max(link, begun, ended) + back
                waited += max(0.0, link - half_way)
                half_way = max(half_way, link)
            now = half_way + of_backward / 2
        return waited

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.steps_of_a_pipeline * (self.forward + self.whole_backward + self.exposed)


def compute_of(job: Job, system: str, forward: float | None = None, backward: float | None = None) -> Compute:
    """Return the compute time of a job's step on one of `SYSTEMS`.

    If the user knows the seconds of a microbatch's forward, the parts are scaled to it; its backward is twice that
    unless it is given too.
    """
    stages = (_stage(job, stage, system) for stage in range(job.parallel.pipeline))
    slowest = max(stages, key=lambda of: of.forward + of.backward + of.recomputed)
    if forward is None:
        return slowest if backward is None else replace(slowest, backward=backward)
    again = slowest.recomputed * (forward / slowest.forward)
    return replace(slowest, forward=forward, backward=2 * forward if backward is None else backward, recomputed=again)


def _stage(job: Job, stage: int, system: str) -> Compute:
    """Return the compute time of a rank of a stage."""
    model: Any = job.config.model
    speed, tokens = SYSTEMS[system].flops * ACHIEVED, tokens_of(job)
    weights: dict[str, float] = {}
    for tensor in job.tensors(stage):
        weights.setdefault(tensor.name, 0.0)
        if "embedding" not in tensor.name or tensor.own_bucket:  # which looks up, and multiplies nothing
            # Of a rank's tokens an expert sees those routed to it, spread evenly.
            share = model.moe_router_topk * job.parallel.expert / model.num_moe_experts if tensor.expert else 1.0
            weights[tensor.name] += 2 * tensor.numel * tokens * share
    layers = len(layers_of_stage(job, stage))
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    pairs = layers * (model.num_attention_heads // job.parallel.tensor) * tokens * model.seq_length
    products, passes = 4 * pairs * head, pairs * HALF / SYSTEMS[system].bandwidth
    if not is_unfused(model):
        products, passes = products // 2, 0.0  # fused attention leaves out what the causal mask does
    attention = products / speed + FORWARD_PASSES * passes
    forward = sum(weights.values()) / speed
    in_layers = sum(flops for name, flops in weights.items() if ".layers." in name) / speed + attention
    seconds = {name: flops / speed for name, flops in weights.items()}
    return Compute(
        forward=forward + attention,
        backward=2 * forward + 2 * products / speed + BACKWARD_PASSES * passes,
        recomputed=_recomputed(model, seconds, attention, in_layers, layers),
        steps_of_a_pipeline=job.microbatches + (job.parallel.pipeline - 1) / chunks_of(model),
        in_layers=in_layers / (forward + attention),
    )


def _recomputed(model: Any, seconds: dict[str, float], attention: float, in_layers: float, layers: int) -> float:
    """Return the seconds of the forward that the backward of a microbatch does again; seconds: of each weight."""
    granularity, is_block, number = recomputation(model)
    if granularity == "full":
        return in_layers * min(1.0, number / max(1, layers)) if is_block else in_layers
    modules = recomputed_modules(model)
    parts = [RECOMPUTED_PARTS[name] for name in modules if name in RECOMPUTED_PARTS]
    again = sum(value for name, value in seconds.items() if any(part in name for part in parts))
    return again + (attention if "core_attn" in modules else 0.0)
