"""The worker that the page on sleeps prints runs, bit for bit."""

import contextlib
import functools
import queue
import re
from pathlib import Path
from unittest.mock import MagicMock

import children
import fused_adam
import pytest
import rank_child
import torch
from both import exact, poison
from cpu_model import layer_spec
from saving import assert_same_shards
from sleeping import KINDS, gone

import bridge_fgo
from bridge_fgo.recipes.tiny import ON_THE_CPU

pytestmark = pytest.mark.usefixtures("cpu_standins", "fused_adam_in_mcore", "poisoned")

PAGE = Path(bridge_fgo.__file__).parent / "sleep/README.md"
VOCAB, LENGTH = 64, 16
PLAIN = {**ON_THE_CPU, "transformer_layer_spec": layer_spec, "gradient_accumulation_fusion": False}


@pytest.fixture(scope="module")
def llamas(cpu_standins, tmp_path_factory):
    """Folders of two Llamas as Hugging Face keeps them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=LENGTH, **sizes)
    folders = [tmp_path_factory.mktemp("llama") for _ in range(2)]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folders


@contextlib.contextmanager
def a_rank(store, rank=0, ranks=1):
    """Give a function that returns a worker of the page; a resident one, where its Residency is to do nothing."""
    from megatron.bridge.training.initialize import destroy_global_state

    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)

    def make(is_resident=False, kind="Worker"):
        destroy_global_state()
        torch.manual_seed(0)
        names = {}
        for source in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(source, names)
        if is_resident:
            names["bridge_fgo"] = MagicMock()
        return names[kind]()

    yield make
    destroy_global_state()
    torch.distributed.destroy_process_group()
    bridge_fgo.uninstall()


@pytest.fixture
def printed():
    """As `a_rank`, of one."""
    with a_rank(torch.distributed.HashStore()) as make:
        yield make


def batches(step):
    from megatron.core import parallel_state

    seed = step + 100 * parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(seed)
    return [{"tokens": torch.randint(VOCAB, (2, LENGTH), generator=generator)} for _ in range(2)]


def forward_step(iterator, model):
    tokens = next(iterator)["tokens"]
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses = model(tokens, torch.arange(LENGTH).expand(tokens.shape), mask, labels=tokens.roll(-1, 1))
    return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})


def adapters():
    from megatron.bridge.peft.lora import LoRA

    return LoRA(target_modules=["linear_qkv", "linear_proj"], dim=4, alpha=8)


def exported(worker):
    found = {}
    worker.export_weights(lambda weights: found.update((name, weight.clone()) for name, weight in weights))
    return found


def trained(worker, steps):
    """Train, asleep before and after each step; return the losses and the weights."""
    losses = []
    for step in steps:
        worker.onload(["params", "grads"])
        losses += worker.train_step(forward_step, batches(step))
        worker.offload()
    return exact([losses, exported(worker)])


def life(worker, llamas, folder, lora, **split):
    """Train, save, load and load new weights; the worker sleeps between the calls, if it can."""
    worker.init_model(llamas[0], lora, lr=1e-2, **PLAIN, **split)
    worker.offload()
    seen = [exact(exported(worker)), trained(worker, range(3))]
    worker.save_checkpoint(folder)
    ends = [trained(worker, (3, 4))]
    worker.load_checkpoint(folder)
    ends.append(trained(worker, (3, 4)))
    assert ends[0] == ends[1] != seen[1], "the checkpoint has all that training goes on from"
    worker.load_weights(llamas[1])
    for group in worker.optimizer.param_groups:
        group["lr"] = 0.0  # a step then writes the weights that the masters have
    _, loaded = trained(worker, (5,))
    return [*seen, *ends, loaded]


def kept_by_hugging_face(folder):
    from safetensors.torch import load_file

    return exact(load_file(folder / "model.safetensors"))


def assert_lives_are_equal(make, llamas, folder, set_attribute, with_lora, **split):
    """Live asleep and resident; what is seen, saved and loaded is the same, and at the end all of it is asleep."""
    from megatron.bridge.peft import utils
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    set_attribute(filesystem_async, "_results_queue", queue.Queue())  # mcore's is in a process of its own
    set_attribute(utils, "HAVE_TE", False)  # it stands in here, and has no layers to tell apart
    lives = []
    for name in ("resident", "asleep"):
        (folder / name).mkdir(exist_ok=True)
        worker = make(is_resident=name == "resident")
        lives.append(life(worker, llamas, folder / name, adapters() if with_lora else None, **split))
    first, second = (kept_by_hugging_face(llama) for llama in llamas)
    assert lives[0] == lives[1] and lives[0][0] == first
    assert (lives[0][-1] == second) != with_lora, "adapters stay, and are merged into what is exported"
    assert_same_shards(folder / "asleep", folder / "resident")
    assert worker.res.away == gone(worker.res) == set(KINDS)
    worker.res.close()


@pytest.mark.parametrize("with_lora", [False, True], ids=["all weights", "lora"])
def test_the_pages_worker_lives_asleep_as_one_that_never_sleeps(printed, llamas, tmp_path, monkeypatch, with_lora):
    assert_lives_are_equal(printed, llamas, tmp_path, monkeypatch.setattr, with_lora)


def states(worker):
    """Return masters, moments and counts of steps, as `exact`."""
    worker.onload()
    adams = [leaf.optimizer for leaf in worker.optimizer.chained_optimizers]
    pairs = [(adam, group) for adam in adams for group in adam.param_groups]
    return exact([[group.get("step"), *([p, adam.state[p]] for p in group["params"])] for adam, group in pairs])


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_the_pages_adapters_that_take_turns_train_as_each_would_alone(printed, llamas, monkeypatch, packed):
    from megatron.bridge.peft import utils

    monkeypatch.setattr(utils, "HAVE_TE", False)
    install = functools.partial(bridge_fgo.install, bridge_fgo.OffloadConfig(master_remainders=packed))
    monkeypatch.setattr(bridge_fgo, "install", install)
    turns = [("a", (0, 1)), ("b", (2, 3, 4)), ("a", (5,)), ("a", (6,)), ("c", (7,)), ("b", (8,)), ("a", (9,))]
    alone = {}
    for name in "abc":
        worker = printed(is_resident=True)
        worker.init_model(llamas[0], adapters(), lr=1e-2, **PLAIN)
        alone[name] = [trained(worker, steps) for other, steps in turns if other == name], states(worker)
    worker = printed(kind="AdapterWorker")
    worker.init_model(llamas[0], adapters(), lr=1e-2, **PLAIN)
    seen = {name: [] for name in "abc"}
    for name, steps in turns:
        worker.use_adapter(name)
        worker.offload()
        seen[name].append(trained(worker, steps))
    for name, (parts, end) in alone.items():
        worker.use_adapter(name)
        assert seen[name] == parts and states(worker) == end
    assert len({str(end) for _, end in alone.values()}) == 3
    worker.res.close()


def lives_of_a_rank(rank, job, llamas, split):
    fused_adam.have_mcore_take_it(setattr)
    poison(pytest.MonkeyPatch())
    store = torch.distributed.FileStore(str(job.folder / "store"), job.ranks)
    with a_rank(store, rank, job.ranks) as make:
        assert_lives_are_equal(make, llamas, job.folder, setattr, True, **split)
    return {}


PIPELINE = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("split", [{}, {"tensor_model_parallel_size": 2}, PIPELINE], ids=["dp", "tp", "pp"])
def test_workers_of_two_ranks_live_asleep_as_ones_that_never_sleep(llamas, tmp_path, split):
    act = functools.partial(lives_of_a_rank, llamas=llamas, split=split)
    children.run_ranks(act, rank_child.Job(tmp_path / "ranks", 2, True, None))


def updated_together(policy, critic, res, chain, step):
    """Update both models in one block; return the losses."""
    with res.training_step(2):
        for chunk in [*policy.model, *critic.model]:
            chunk.zero_grad_buffer()
        chain.zero_grad()
        losses = [passes(worker, batches(step + n)) for n, worker in enumerate((policy, critic))]
        chain.step()
    res.offload()
    res.reload()
    return exact(losses)


def passes(worker, data):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=forward_step, model=worker.model, data_iterator=iter(data), num_microbatches=len(data),
        micro_batch_size=2, seq_length=LENGTH, forward_only=False,
    )  # fmt: skip


def test_a_policy_and_a_critic_update_together_in_one_block_and_two_open_blocks_are_refused(printed, llamas):
    from megatron.core.optimizer import ChainedOptimizer

    ends = []
    for is_resident in (True, False):
        policy = printed(is_resident)
        critic = type(policy)()
        for worker, folder in zip((policy, critic), llamas, strict=True):
            worker.init_model(folder, lr=1e-2, **PLAIN)
        if not is_resident:
            with policy.res.training_step(), pytest.raises(RuntimeError, match="inside of a training step"):
                critic.train_step(forward_step, batches(0))
        policy.res.close()
        critic.res.close()
        chain = ChainedOptimizer([leaf for each in (policy, critic) for leaf in each.optimizer.chained_optimizers])
        models = [*policy.model, *critic.model]
        res = MagicMock() if is_resident else bridge_fgo.Residency(models, chain)
        losses = [updated_together(policy, critic, res, chain, step) for step in range(4)]
        weights = [exact([parameter.detach() for parameter in chunk.parameters()]) for chunk in models]
        ends.append((losses, weights))
        res.close()
    assert ends[0] == ends[1]
