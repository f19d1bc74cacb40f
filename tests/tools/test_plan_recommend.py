"""`plan --recommend` is within 5% of the step times of logged runs."""

import re
import shlex
from dataclasses import replace

import pytest
from built_jobs import job
from cli import run, told

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.job.job import Job, read_job
from bridge_fgo.tools.job.recomputation import KINDS, OFFLOADED
from bridge_fgo.tools.plan import recommend
from bridge_fgo.tools.plan.command import check_of
from bridge_fgo.tools.plan.compute import Compute, compute_of
from bridge_fgo.tools.plan.estimate import make_estimate
from bridge_fgo.tools.plan.options import Settings
from bridge_fgo.tools.plan.systems import links
from harness.bench.presets import PRESETS

RAN_ON = "CPU, against runs on one H200"

pytestmark = pytest.mark.slow

GB = 10**9
REFUSED = dict.fromkeys([*KINDS, OFFLOADED], "no")
TIGHT = f"{PRESETS['tight']} --gbs 32"
NINE = "--layers 48 --hidden 4096 --ffn 11008 --heads 32 --vocab 32000 --seq 2048 --mbs 1 --gbs 1 --recompute attention"

# The config, the way of running it; measured on one H200: GB of the peak and seconds of a step, and how near the
# prediction is at least. 1.64B parameters have kernels too short for half of the data sheet's rate.
RUNS = {
    "5.93B, attention recomputed": (f"{TIGHT} --recompute attention", "as configured", 130.57, 6.22, 0.02),
    "5.93B, all recomputed": (f"{TIGHT} --mbs 4 --recompute full", "as configured", 111.99, 7.28, 0.06),
    "5.93B, all offloaded": (TIGHT, "as configured, all offloaded", 76.82, 6.90, 0.03),
    "5.93B, budget auto": (TIGHT, "as configured, least offload", 142.19, 5.71, 0.01),
    "1.64B": (f"{PRESETS['short']} --gbs 8", "as configured", 48.23, 0.520, 0.2),
    "1.64B, all offloaded": (f"{PRESETS['short']} --gbs 8", "as configured, all offloaded", 28.54, 0.823, 0.1),
    "9.17B, all offloaded": (NINE, "as configured, all offloaded", 73.34, 2.61, 0.12),
}


def recommended(
    of_job: Job | str, system: str = "H200", gpus: int | None = 1, **how: object
) -> recommend.Recommendation:
    """Return the ways to run a job on a system with so many GPUs a node.

    of_job: a job, or the options of one. how: see `Recommender`; if the job is given by options, what to change in it.
    """
    if isinstance(of_job, str):
        of_job, how = replace(job(of_job, 1), **how), {}
    (link,) = links(system, None, gpus)
    return recommend.Recommender(of_job, link, **how).recommend()


def packed_job(options: str) -> Job:
    """Return a job as it was measured by versions that packed masters by default."""
    return replace(job(options, 1), offload=OffloadConfig(master_remainders=True))


def as_measured(of_job: Job, seconds: float, system: str = "H200") -> dict[str, float]:
    """Return seconds of a microbatch where a step takes so many, of a GPU at another rate than is counted."""
    counted = compute_of(of_job, system)
    times = seconds / counted.step
    return {"forward": counted.forward * times, "backward": counted.whole_backward * times}


def choice(found: recommend.Recommendation, name: str) -> recommend.Choice:
    return next(one for one in found.choices if one.name == name)


@pytest.mark.parametrize("name", RUNS)
def test_predicted_against_measured(name):
    options, way, peak, seconds, near = RUNS[name]
    found = choice(recommended(options), way)
    print(f"{name}: predicted {found.peak / GB:.2f} GB, {found.step:.3f} s; measured {peak} GB, {seconds} s")
    assert found.peak == pytest.approx(peak * GB, rel=0.01)
    assert found.step == pytest.approx(seconds, rel=near)


@pytest.mark.parametrize(
    ("ways", "advised"),
    [
        ([(1, 1.002, True), (3, 1.0, True)], 0),  # as fast, by what an estimate can tell
        ([(1, 1.04, True), (3, 1.0, True)], 1),
        ([(1, 1.0, False), (3, 1.0, True), (3, 0.999, True)], 2),
        ([(1, 1.0, False)], None),
    ],
)
def test_of_ways_that_are_about_as_fast_the_one_with_the_fewest_settings_is_advised(ways, advised):
    choices = [recommend.Choice("", ("a=1",) * settings, 1, 1, step, fits, 1, 1.0) for settings, step, fits in ways]
    assert recommend.advised_of(choices) is (None if advised is None else choices[advised])
    for less in ("optimizer.offload.gpu_memory_budget_gib=auto", recommend.FLAG_OFF):
        everything, least = (
            recommend.Choice("", settings, 1, away, 1.0, True, 1, 1.0) for settings, away in (((), 9), ((less,), 0))
        )
        assert recommend.advised_of([everything, least]) is least, "a setting that offloads less is no reason for more"


def test_the_fastest_that_fits_is_advised_and_it_was_the_fastest_measured():
    found = recommended(f"{TIGHT} --recompute attention")
    assert found.advised is choice(found, "no recomputation, least offload")
    assert found.sentence == (
        "Recommended: no recomputation, least offload (7% faster than resident): "
        "optimizer.offload_optimizer_states=true optimizer.offload.gpu_memory_budget_gib=auto "
        "model.recompute_granularity=null"
    )
    assert found.change(found.advised) == pytest.approx(5.71 / 6.22 - 1, abs=0.02)  # as measured
    assert found.advised.peak <= found.room < choice(recommended(TIGHT), "as configured").peak


FIVE = "--layers 5 --hidden 2048 --ffn 8192 --heads 16 --seq 8192 --mbs 3 --gbs 6 --recompute attention --vocab 8192"
WORDS = "--layers 5 --hidden 2048 --ffn 8192 --heads 16 --seq 4096"  # of 32,000
WIDE = "--layers 4 --hidden 3072 --ffn 12288 --heads 24 --groups 8 --seq 4096 --vocab 8192"
LONG, SHORT = PRESETS["long"], PRESETS["short"]
ALL, LAZY, MOVED = (f"as configured, {way}all offloaded" for way in ("", "gradients lazy, ", "gradients offloaded, "))
RECOMPUTED = ("as configured", "attention recomputed", "all recomputed")
ACTIVATIONS = {
    FIVE: ("unfused", ["qkv_linear"], (0.9466, 32.05), (0.9605, 27.87), (0.9461, 31.25), (0.9632, 27.07)),
    f"{WIDE} --mbs 4 --gbs 16": (
        "fused", ["core_attn", "attn_proj", "qkv_linear"],
        (0.4064, 23.28), (0.4757, 16.03), (0.4169, 21.57), (0.5116, 14.32),
    ),
    f"{WORDS} --mbs 6 --gbs 12": (
        "unfused", ["qkv_linear"], (0.3933, 43.27), (0.4130, 37.92), (0.3949, 42.56), (0.4248, 37.21),
    ),
    f"{WORDS} --mbs 12 --gbs 24": (
        "unfused", ["qkv_linear"], (0.7772, 78.39), (0.7884, 73.04), (0.7753, 76.98), (0.7916, 71.63),
    ),
}  # fmt: skip
"""Of jobs on one H200 attention, modules whose activations were offloaded, and seconds of a step and GB at the peak:
resident, with the states offloaded, with activations, with both."""
MEASURED = [
    # 1.64B parameters, every step logged.
    (f"{PRESETS['8k']} --gbs 4", "H200", False, 3.186, {ALL: (3.325, 36.91)}),
    (f"{PRESETS['8k']} --gbs 1", "H200", False, 0.817, {ALL: (0.954, 36.91)}),
    (f"{SHORT.replace('2048 --mbs', '4096 --mbs')} --gbs 8 --recompute full", "H200", False, 1.633,
     {ALL: (2.037, 13.29)}),
    # With nothing, attention, and all of a layer recomputed.
    (f"{WORDS} --mbs 2 --gbs 8", "H100", False, 0.3503,
     dict(zip(RECOMPUTED, ((0.3503, 19.85), (0.3960, 14.57), (0.4528, 10.83)), strict=True))),
    (f"{WIDE} --mbs 2 --gbs 8", "H100", False, 0.3965,
     dict(zip(RECOMPUTED, ((0.3965, 23.81), (0.4685, 19.03), (0.5458, 14.94)), strict=True))),
    # By versions that packed masters by default, and with gradients too if that was compared.
    (f"{LONG} --layers 12 --gbs 6", "H200", True, 2.258, {ALL: (2.286, 51.24), MOVED: (2.286, 48.98)}),
    (f"{LONG} --layers 8 --gbs 3", "H200", True, 0.776, {ALL: (0.802, 38.22), LAZY: (0.799, 36.40)}),
    (f"{SHORT} --gbs 2", "H200", True, 0.193, {ALL: (0.436, 28.54), LAZY: (0.439, 21.97)}),
    (f"{SHORT} --layers 16 --gbs 8", "H200", True, 0.452, {ALL: (0.608, 19.59)}),
]  # fmt: skip
"""Jobs on one GPU: whether masters were packed, seconds of a step as configured, and those and GB of ways to run it."""


@pytest.mark.parametrize("options", ACTIVATIONS)
def test_activation_offload_is_compared_with_states_within_five_percent_of_what_was_measured(options):
    attention, modules, *measured = ACTIVATIONS[options]
    of_job = packed_job(options)
    of_job.config.model.attention_backend = attention
    given, found = as_measured(of_job, measured[0][0]), []
    for offloaded in ([], modules):
        vars(of_job.config.model).update(fine_grained_activation_offloading=bool(offloaded), offload_modules=offloaded)
        ways = recommended(of_job, **given)
        found += [choice(ways, way) for way in ("as configured", ALL)]
    assert [one.step for one in found] == pytest.approx([seconds for seconds, _ in measured], rel=0.05)
    assert [one.peak for one in found] == pytest.approx([peak * GB for _, peak in measured], rel=0.05)


@pytest.mark.parametrize(("options", "system", "packed", "seconds", "measured"), MEASURED)
def test_ways_to_run_a_job_are_compared_within_five_percent_of_what_was_measured(
    options, system, packed, seconds, measured
):
    of_job = packed_job(options) if packed else job(options, 1)
    found = recommended(of_job, system, **as_measured(of_job, seconds, system))
    for way, (step, peak) in measured.items():
        assert choice(found, way).step == pytest.approx(step, rel=0.05)
        assert choice(found, way).peak == pytest.approx(peak * GB, rel=0.05 if packed else 0.02)
    if packed:
        (term,) = (term for term in found.terms if term.startswith("gradients: "))
        assert ("longer than a backward of 0.074 s hides" in term) == (len(measured) == 1)
        assert len(measured) == 1 + any(one.name in (LAZY, MOVED) for one in found.choices)
    elif system == "H200":  # of logged steps
        (term,) = [each for each in found.terms if "more than the least memory" in each]
        added = [float(seconds) for seconds in re.findall(r"([\d.]+) s with", term)]
        assert len(added) == 3 and choice(found, ALL).step - seconds >= added[0] >= added[1] >= added[2]


def test_gradients_are_offloaded_where_states_alone_do_not_fit():
    found = recommended(replace(job(f"{LONG} --layers 12 --gbs 6", 1), recomputations=REFUSED), room=49 * GB)
    assert found.advised is choice(found, "as configured, gradients offloaded, all offloaded")
    assert "optimizer.offload.gradients=true" in found.advised.overrides
    assert not choice(found, "as configured, all offloaded").fits
    moved = choice(found, found.advised.name).offloaded - choice(found, "as configured, all offloaded").offloaded
    assert moved == pytest.approx(3.54 * GB, abs=0.005 * GB)


def test_activation_offload_is_offered_with_its_terms_and_costs_what_it_cannot_hide():
    found = recommended(FIVE)
    offloaded = choice(found, "activations offloaded")
    assert offloaded.overrides == (
        "model.fine_grained_activation_offloading=True", "model.offload_modules=[qkv_linear]",
    )  # fmt: skip
    assert offloaded.peak < found.choices[0].peak and offloaded.step == found.choices[0].step
    of_four = 4 * 2 * (3 * 8192) * 2048 * 2  # layers but the last, the norm's input and output, tokens, hidden, bf16
    assert offloaded.offloaded == of_four
    (term,) = (term for term in found.terms if term.startswith("activations offloaded"))
    assert "0.81 GB a microbatch take 0.015 s to the host and 0.015 s back. What " in term
    assert "do not hide, 0.000 s, is added" in term and "NVTE_CPU_OFFLOAD_V1=1" in term
    (link,) = links("H200", 1.0, 1)
    slow = recommend.Recommender(job(FIVE, 1), replace(link, name="H200")).recommend()
    compute = compute_of(job(FIVE, 1), "H200")
    of_microbatch = compute.forward + compute.whole_backward
    # The link is busy from half-way through the first layer's forward to half-way through its backward.
    added = 2 * of_four / 1e9 + of_microbatch * (compute.in_layers / 5 / 2 - 1)
    assert choice(slow, "activations offloaded").step == pytest.approx(slow.choices[0].step + 2 * added)


@pytest.mark.parametrize(
    ("out", "back", "in_layers", "added"),
    [
        (1, 2, 1.0, 0.0),
        (3, 3, 1.0, 0.5 + 9 + 9 + 1 - 12),
        (1.5, 2, 1.0, 0.0),
        (2, 1, 1.0, 0.5 + 6 + 1 - 7),  # the third layer is late on the host, and so are its copies back
        (2, 1, 0.5, 0.0),  # the output layer's backward is before them
        (1, 3, 1.0, 1 + 1 + 1),
    ],
)
def test_copies_of_a_layer_hide_behind_the_layers_around_it(out, back, in_layers, added):
    """A layer's forward takes a second and its backward two, where layers are all there is; the last is not copied."""
    compute = Compute(4.0, 8.0, 0.0, 1.0, in_layers, (*(((out, back),) * 3), (0, 0)))
    assert compute.exposed == pytest.approx(added)


def test_beside_a_configs_own_activation_offload_ways_without_it_are_compared():
    of_job = job(FIVE, 1)
    vars(of_job.config.model).update(fine_grained_activation_offloading=True, offload_modules=["qkv_linear"])
    found = recommended(of_job)
    assert choice(found, "activations resident").peak == recommended(FIVE).choices[0].peak > found.choices[0].peak
    whole = choice(found, "all recomputed")
    assert whole.peak == choice(recommended(FIVE), "all recomputed").peak
    assert "model.fine_grained_activation_offloading=False" in whole.overrides


@pytest.mark.parametrize("graphs", [["attn"], ["moe_router"]])
def test_norms_that_mcore_does_not_offload_beside_cuda_graphs_are_neither_offered_nor_counted(graphs):
    of_job = job(f"{FIVE} --experts 4 --topk 2 --grouped-experts", 1)
    model = of_job.config.model
    assert choice(recommended(of_job), OFFLOADED).overrides[1].endswith("[qkv_linear,mlp_norm,expert_fc1,moe_act]")
    model.cuda_graph_modules = graphs
    without = choice(recommended(of_job), OFFLOADED)
    assert without.overrides[1].endswith("[qkv_linear,expert_fc1,moe_act]")
    vars(model).update(fine_grained_activation_offloading=True, offload_modules=["qkv_linear", "expert_fc1", "moe_act"])
    stages = make_estimate(of_job).stages
    model.offload_modules += ["mlp_norm"]
    assert make_estimate(of_job).stages == stages and stages[0].peak(0) == without.peak
    model.offload_modules = ["attn_norm"]
    assert make_estimate(of_job).knows_activations is (graphs == ["attn"]), "it stays, or is not counted"


def test_layers_that_transformer_engine_offloads_have_their_terms_too():
    options = "--layers 4 --hidden 1024 --heads 16 --seq 2048 --mbs 4 --gbs 16"
    found = recommended(f"{options} --cpu-offloading-layers 2")
    (term,) = (term for term in found.terms if term.startswith("activations offloaded"))
    assert term.startswith("activations offloaded: 1.64 GB a microbatch") and "NVTE_CPU" not in term
    without = recommended(options)
    assert found.choices[0].step > without.choices[0].step, "the link takes longer than the forward"
    resident, again = (choice(found, name) for name in ("activations resident", "all recomputed"))
    assert (resident.step, resident.peak) == (without.choices[0].step, without.choices[0].peak)
    assert resident.overrides == ("model.cpu_offloading=False",)
    assert again.peak == choice(without, "all recomputed").peak and "model.cpu_offloading=False" in again.overrides


def test_the_sentence_says_if_the_config_does_not_fit_if_nothing_has_to_leave_and_if_nothing_trains():
    found = recommended(TIGHT)
    assert not found.choices[0].fits and found.advised is not None
    assert re.search(r"\(\d+% slower than resident, which does not fit\): ", found.sentence)
    found = recommended(f"{SHORT} --gbs 8")
    assert found.advised is found.choices[0] and found.sentence.endswith("; nothing needs to leave the GPU")
    flagged = recommended(f"{SHORT} --gbs 8", flag=True).sentence
    assert flagged == f"{found.sentence}: optimizer.offload_optimizer_states=false"
    found = recommended(NINE, "H100", refusals=["no"])
    assert found.advised is None and "more GPUs" in found.sentence
    assert not any("offload" in one.name for one in found.choices)  # which is refused
    assert "not offered: no recomputation: it does not fit, nor with the offload" in found.terms


def test_what_bridge_refuses_is_not_offered_and_what_has_to_be_turned_off_is_advised():
    graphs = "model.cuda_graph_impl=none"
    found = recommended(TIGHT, recomputations={"all recomputed": "no graphs", "attention recomputed": [graphs]})
    assert not any(one.name.startswith("all recomputed") for one in found.choices)
    assert found.terms[-1] == "not offered: all recomputed: Megatron-Bridge refuses it here: no graphs"
    assert graphs in choice(found, "attention recomputed").overrides


def test_settings_of_the_config_that_the_advice_replaces_are_undone():
    found = recommended(TIGHT, offload=OffloadConfig(gpu_memory_budget_gib=100.0))
    assert "optimizer.offload.gpu_memory_budget_gib=null" in choice(found, "as configured, all offloaded").overrides
    settings = Settings(
        "a b:c", ["optimizer.offload.fraction=0.5", "train.x=1"], gpus=8, system="H200", offload={"piece_bytes": 2**20}
    )
    assert check_of(settings, ("optimizer.offload.fraction=null", "model.recompute_modules=[moe]")) == (
        "bridge-fgo plan 'a b:c' --system H200 --gpus 8 --piece-bytes 1048576 --check train.x=1 "
        "optimizer.offload.fraction=null 'model.recompute_modules=[moe]'"
    )
    (offload,) = (one for one in recommended(FIVE).choices if one.name == OFFLOADED)
    command = check_of(Settings("tiny", system="H200"), offload.overrides)
    assert command.startswith("NVTE_CPU_OFFLOAD_V1=1 bridge-fgo plan tiny --system H200 --check model.fine_grained_")


def test_the_largest_micro_batch_divides_the_batch_and_fits_and_a_resident_way_turns_the_flag_off():
    found = recommended(f"{TIGHT} --recompute attention", flag=True)
    for name in ("all recomputed", "HybridDeviceOptimizer"):
        assert choice(found, name).overrides[0] == "optimizer.offload_optimizer_states=false", "a resident way"
    assert "optimizer.offload_optimizer_states=true" not in found.advised.overrides
    (larger,) = (one for one in found.choices if one.name.startswith("micro batch"))
    assert larger.name == "micro batch of 8, all offloaded" and larger.fits
    over = recommend.with_settings(job(f"{TIGHT} --recompute attention", 1), train={"micro_batch_size": 16})
    assert not choice(recommended(over), "as configured, all offloaded").fits


def test_given_seconds_are_of_the_configs_own_microbatch_and_what_it_recomputes():
    of_job = job(f"{FIVE} --recompute full --gbs 12", 1)
    as_counted = recommended(of_job)
    given = recommended(of_job, **as_measured(of_job, compute_of(of_job, "H200").step))
    assert [one.name for one in given.choices] == [one.name for one in as_counted.choices]
    for one, other in zip(given.choices, as_counted.choices, strict=True):
        assert one.step == pytest.approx(other.step), one.name
    assert any(one.name.startswith("micro batch of 12") for one in given.choices)
    with pytest.raises(ValueError, match=r"--backward-seconds 0\.1: what the config recomputes takes 0\.196 s"):
        recommended(of_job, forward=0.2, backward=0.1)
    of_job = job(f"{TIGHT} --recompute attention", 1)
    counted, given = recommended(of_job), recommended(of_job, forward=1.0)  # which scales what is recomputed
    assert given.choices[0].step > 16 * 3.0 and "as given" in given.terms[0]
    ratios = [one.change(choice(one, "all recomputed")) for one in (counted, given)]
    assert ratios[0] == pytest.approx(ratios[1], abs=0.05)


def test_the_terms_tell_of_what_a_way_costs_and_why_one_is_missing():
    found = recommended(FIVE, recomputations={"MLP recomputed": "no"}).terms
    begins = ("compute: 2 microbatches of ", "states: all of them take 0.0", "gradients: True takes ",
              "recomputed in each microbatch: MLP 0.0", "activations offloaded: 0.81 GB a microbatch take ",
              "not offered: MLP recomputed: Megatron-Bridge refuses it here: no")  # fmt: skip
    assert [sum(term.startswith(begin) for term in found) for begin in begins] == [1] * len(begins)
    of_job = job(f"{WIDE} --mbs 4 --gbs 16 --pp 2 --vpp 2", 2)
    of_job.config.model.attention_backend = "fused"
    found = recommended(of_job)
    assert found.terms[-1].startswith("not offered: attention recomputed: of fused attention it spares nothing")
    assert choice(found, OFFLOADED).fits
    vars(of_job.config.model).update(fine_grained_activation_offloading=True, offload_modules=["qkv_linear"])
    assert any("mcore 0.19 ends with Chunk mismatch" in note for note in make_estimate(of_job).notes)
    of_job.config.model.fine_grained_activation_offloading = False
    given = recommended(of_job, activations=GB).terms
    assert sum(term.endswith("activations are not counted, but as --activations-gb says") for term in given) > 2


def test_the_fewest_gpus_are_found_with_and_without_the_offload():
    of_job = replace(read_job("qwen3_235b_a22b_64gpu", None, {}), recomputations={})
    found = recommended(of_job, gpus=None)
    assert (found.fewest.gpus, found.fewest.name) == (64, "as configured, least offload")
    resident = found.choices[-1]
    assert (resident.gpus, resident.fits, resident.offloaded) == (128, True, 0)
    assert not found.choices[0].fits  # and there are none between that would do
    tokens = of_job.config.train.global_batch_size * of_job.config.model.seq_length
    assert found.choices[0].rate == pytest.approx(tokens / found.choices[0].step / 64)
    # And where nothing fits on those that there are, more are advised.
    found = recommended(replace(of_job, recomputations=REFUSED, refusals=["no"]), gpus=None)
    assert found.advised is None and found.fewest.gpus == 128
    assert found.sentence == f"Recommended: {found.fewest.name}; nothing fits on 64"


@pytest.mark.parametrize(("name", "gpus"), [("qwen3_30b_a3b_8gpu", 16), ("llama3_70b_64gpu", 32)])
def test_a_job_on_other_gpus_has_what_mcore_lays_out_there(name, gpus):
    ours, mcores = recommend.on_gpus(read_job(name, None, {}), gpus), read_job(name, gpus, {})
    one, other = (make_estimate(each, links=links("H200"), activations=GB) for each in (ours, mcores))
    for peak in ("resident_peak", "offloaded_peak", "least_budget"):
        assert getattr(one, peak) == pytest.approx(getattr(other, peak), rel=2e-3), peak
    assert max(one.pinned) == pytest.approx(max(other.pinned), rel=2e-3)


def test_the_command_prints_what_is_advised_and_as_json_or_what_it_needs_to_tell(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = ("plan", "qwen3_30b_a3b_8gpu", "--system", "H200", "--recommend")
    status, output = run(*words)
    assert status == 0 and "Recommended: as configured, least offload (" in output and "HybridDeviceOptimizer" in output
    found = told(*words)[1]["recommendation"]
    assert found["advised"]["overrides"] == ["optimizer.offload.gpu_memory_budget_gib=auto"]
    figures = {"name", "overrides", "peak", "offloaded", "step", "fits", "gpus", "rate", "close"}
    assert figures == found["choices"][0].keys()
    status, output = run(*shlex.split(found["command"])[1:])
    assert status == 0 and output.startswith("Fits only with the offload on 8 GPUs of H200")

    words = ("plan", "nemotron_3_nano_8gpu", "--system", "H200", "--recommend")
    status, output = run(*words)
    assert status == 2 and "--recommend: activations are not counted with model.hybrid_" in output
    status, output = run(*words, "--activations-gb", "20")
    assert status == 0 and "Recommended: " in output and "recomputed  " not in output
