"""`plan LOG`: from an out-of-memory error to the settings with which the job fits."""

import shlex

import pytest
from cli import invoke, told

from bridge_fgo.config import readable
from bridge_fgo.tools.plan import log
from bridge_fgo.tools.plan.log import of_log
from bridge_fgo.tools.plan.options import Settings

JOB = "qwen3_235b_a22b_64gpu"
GIB = 2**30
SUMMARY = """
{0}Configuration Summary (Non-Default Values vs Megatron Core)
{0}[model] Non-default values (vs Mcore TransformerConfig):
{0}  attention_dropout: 0.0  (Mcore default: 0.1)
{0}  attention_backend: <AttnBackend.auto: 5>  (Mcore default: <AttnBackend.auto: 5>)
{0}  expert_model_parallel_size: 8  (Mcore default: 1)
{0}  pipeline_model_parallel_size: 8  (Mcore default: 1)
{0}
{0}[train]:
{0}  global_batch_size: {1}
{0}  micro_batch_size: 1
{0}
{0}[checkpoint]:
{0}  save: 'checkpoints'
"""


def error(asked="1.17 GiB", free="448.44 MiB", capacity="139.81 GiB", allocated="138.20 GiB", beside="", gpu=1) -> str:
    """Return the text of PyTorch's error."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU {gpu} has a total capacity of "
        f"{capacity} of which {free} is free. {beside}Of the allocated memory {allocated} is allocated by PyTorch, and "
        "40.42 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\n"
    )


def log_of(folder, text: str) -> str:
    path = folder / "job.log"
    path.write_text(text)
    return str(path)


def planned(folder, text: str, *options: str):
    """Plan a log; return the status and the object that is printed."""
    return told("plan", log_of(folder, text), *options)


@pytest.mark.parametrize(
    ("text", "rank", "short"),
    [
        (f"[rank17]: {error()}", 17, 1.17 - 448.44 / 1024),
        (f"5: {error(beside='Including non-PyTorch memory, this process has 139.37 GiB memory in use. ')}", 5, 0.732),
        (f"[default1]:[rank9]: {error(beside='Process 12 has 1.00 GiB memory in use. ')}", 9, 0.732),
        (error(free="0 bytes"), None, 1.17),
        (f"[rank0]: {error(free='90.00 GiB', allocated='40.00 GiB', beside='41.00 GiB allowed; ')}", 0, 0.21),
        (f"[rank3]: {error(allocated='130.00 GiB')}[rank4]: {error()}[rank4]: {error(asked='9.00 GiB')}", 4, 0.732),
    ],
)
def test_the_rank_that_needed_the_most_is_named_with_what_was_short(tmp_path, text, rank, short):
    _, log = of_log(Settings(log_of(tmp_path, text), job=JOB))
    first = log.errors[0]
    assert first.rank == rank and first.needed - first.usable == pytest.approx(short * GIB, abs=0.01 * GIB)
    assert readable(first.needed - first.usable) in first.told


TRACEBACK = "[rank17]: Traceback (most recent call last):\n" + "".join(
    f'[rank17]:   File "x.py", line 9, in {name}\n' for name in ("train_step", "backward_step")
)
WITH_A_NEIGHBOUR = error(beside="Process 3 has 30.00 GiB in use. ", capacity="178.90 GiB", allocated="132.20 GiB")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (f"torchrun run_recipe.py --recipe {JOB}\n{TRACEBACK}[rank17]: {WITH_A_NEIGHBOUR}", ()),
        (f"[rank1]: {error(allocated='138.50 GiB')}", ("--job", "nemotron_3_nano_8gpu")),  # activations are the log's
    ],
)
def test_a_log_is_answered_with_a_check_that_fails_for_the_job_as_it_ran_and_passes_as_advised(tmp_path, text, options):
    status, whole = planned(tmp_path, text, *options)
    found = whole["recommendation"]
    advised, (_, *command) = found["advised"], shlex.split(found["command"])
    assert status == 0 and advised["fits"] and advised["peak"] <= found["room"] < found["choices"][0]["peak"]
    assert any("no Configuration Summary" in note for note in whole["notes"])
    if not options:  # as it ran it would fit a B200 of its own
        assert "on pipeline stage 2 of 8: rank 17 was short by 0.73 GiB in backward" in whole["said"][0]
        assert "optimizer.offload_optimizer_states=true" in advised["overrides"]
    as_it_ran = [word for word in command if word not in advised["overrides"]]
    assert as_it_ran != command and "--check" in as_it_ran
    assert invoke(*as_it_ran, "optimizer.offload_optimizer_states=false").exit_code == 1
    assert invoke(*command).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["true", "false"])
def test_the_way_that_ran_out_of_memory_is_never_advised_again(tmp_path, flag):
    """Also where the plan counts less than the log shows: a stage that would fit by far."""
    text = f"[rank63]: bridge_fgo\n[rank63]: {error()}"
    _, found = planned(tmp_path, text, "--job", JOB, f"optimizer.offload_optimizer_states={flag}")
    ran = 0 if flag == "false" else 1
    assert not found["recommendation"]["choices"][ran]["fits"]
    assert any("that the plan does not count" in line for line in found["said"])


@pytest.mark.slow
def test_memory_that_is_not_counted_for_a_model_is_what_the_log_shows(tmp_path):
    status, found = planned(tmp_path, f"[rank1]: {error()}", "--job", "nemotron_3_nano_8gpu")
    assert status == 0 and found["stages"][0]["peak_resident"] == pytest.approx(139.37 * GIB, rel=1e-3)


@pytest.mark.parametrize("prefix", ["", "0: ", "[default0]:"])
def test_settings_that_bridge_has_printed_win_over_the_recipes(tmp_path, prefix):
    text = SUMMARY.format(prefix, 1024) + f"WORLD_SIZE=128\nnranks 8\n[rank3]: {error()}"
    settings, _ = of_log(Settings(log_of(tmp_path, text), job=JOB))
    assert settings.overrides == ["train.global_batch_size=1024", "optimizer.offload_optimizer_states=false"]
    assert (settings.gpus, settings.system) == (128, "H200")
    given = of_log(Settings(log_of(tmp_path, text), job=JOB, gpus=64, overrides=["train.global_batch_size=512"]))[0]
    assert given.gpus == 64 and "train.global_batch_size=1024" not in given.overrides


def test_a_run_config_is_found_by_what_the_log_names_and_in_a_checkpoint(tmp_path):
    saved = tmp_path / "checkpoints" / "iter_0000100" / "run_config.yaml"
    saved.parent.mkdir(parents=True)
    saved.write_text("_target_: megatron.bridge.training.config.ConfigContainer\n")
    settings, log = of_log(Settings(log_of(tmp_path, SUMMARY.format("", 2048) + f"[rank3]: {error()}")))
    assert settings.target == str(saved) and log is not None
    assert of_log(Settings(str(saved.parents[1]))) == (Settings(str(saved)), None)
    (tmp_path / "run.yaml").write_text(saved.read_text())
    named = f"  save_config_filepath: 'run.yaml'\n[rank3]: {error()}"
    assert of_log(Settings(log_of(tmp_path, named)))[0].target == str(tmp_path / "run.yaml")


OF_ANOTHER = SUMMARY.replace("{0}  expert_model", "{0}  num_layers: 48  (Mcore default: 0)\n{0}  expert_model")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (None, ("--job", JOB), "tiny is no log"),
        (None, (), "has no run_config.yaml and no log (*.log, *.out"),
        ("trained\n", (), "has no error of PyTorch's"),
        ("RuntimeError: CUDA error: out of memory\n", (), "it has 'RuntimeError: CUDA error: out of memory', which"),
        (f"[rank3]: {error()}", (), "It does not say which job it is of: add --job RECIPE"),
        (f"--recipe no_such_config\n[rank3]: {error()}", (), "It names no_such_config, which the installed Megatron-B"),
        (f"[rank3]: {error(capacity='31.74 GiB')}", ("--job", JOB), "No known system has 31.74 GiB: add --system"),
        (f"[rank64]: {error()}", ("--job", JOB), "the log names rank 64, and the job has 64 ranks: give --gpus"),
        (f"[rank3]: {error()}", ("--job", JOB, "--check", "--system", "H200"), "--check: "),
        (OF_ANOTHER.format("", 1024) + error(), ("--job", JOB),
         f"the log's job has num_layers=48, and {JOB} has 94: give its own recipe"),
        (SUMMARY.format("", 1024) + error(), ("--job", JOB, "--system", "GB200"),
         "--system GB200: the log's GPU has 139.81 GiB, that of H200"),
    ],
)  # fmt: skip
def test_what_a_log_does_not_say_or_contradicts_is_asked_for_in_one_line(tmp_path, text, options, said):
    target = tmp_path if text is None else log_of(tmp_path, text)
    done = invoke("plan", target if said != "tiny is no log" else "tiny", *options)
    assert done.exit_code == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_settings_of_a_saved_builders_model_are_advised_where_they_are(tmp_path):
    path = tmp_path / "run_config.yaml"
    path.write_text("_target_: ConfigContainer\nmodel: {seq_length: 8, transformer: {tensor_model_parallel_size: 2}}\n")
    advised = log._different({"model": {"tensor_model_parallel_size": 4}}, str(path), set())
    assert "model.transformer.tensor_model_parallel_size=4" in advised
    same = log._different({"model": {"tensor_model_parallel_size": 2}}, str(path), set())
    assert not any("tensor_model_parallel_size=" in override for override in same)


def test_the_offload_that_a_recipe_asks_for_and_steps_that_were_over_are_read_from_the_log(tmp_path):
    def of(text: str) -> log.Log:
        settings, found = of_log(Settings(log_of(tmp_path, text + error()), job=JOB))
        assert found is not None and found.lacks_offload == any(log.FLAG in one for one in settings.overrides or ())
        return found

    ran = "[default0]:bridge_fgo: optimizer-state offload on, engine native\n"
    step = " [2026-11-27 09:00:00] iteration        1/      50 | elapsed time per iteration (ms): 9.0 |\n"
    assert (of("torchrun -m bridge_fgo.recipes.train\n").lacks_offload, of(ran).lacks_offload) == (True, False)
    assert (of(ran).has_steps, of(step).has_steps) == (False, True)
