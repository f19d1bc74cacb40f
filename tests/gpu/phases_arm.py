"""One arm of the phases' tests: a GPT by mcore's own DDP and DistributedOptimizer, which sleeps between steps or not.

    python tests/gpu/phases_arm.py --sleep packed

Prints one JSON object. Without a GPU the model is a tiny one, on the CPU: that the arm runs is all that this shows.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS))  # of the harness, and of uses of what is away

CYCLES = 3
SPOILED_EACH = 4
"""After the first cycles, how often free memory is spoiled: that takes seconds where the GPU has 141 GB."""
UNUSED = (
    *("add_bias_linear", "persist_layer_norm", "apply_rope_fusion", "gradient_accumulation_fusion"),
    *("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "cross_entropy_loss_fusion"),
)
SETTLING_SECONDS = 0.5
"""What the driver gets for clearing what was spoiled, which takes time of the copies that follow."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sleep",
        choices=("never", "whole", "packed", "touched", "swapped", "saved"),
        default="never",
        help="how masters leave; touched, swapped, saved: see `touch`, `swap` and `save`",
    )
    parser.add_argument("--strategy", choices=("nvrx", "mcore"), default="nvrx", help="whose worker writes saves")
    parser.add_argument("--constant-structure", action="store_true", help="of saves")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--side-stream", action="store_true", help="train and sleep on a stream of its own")
    parser.add_argument("--sharing", type=int, default=1, help="how many arms have the GPU at the same time")
    add_model_options(parser)
    return parser.parse_args(arguments)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the `Trainer` goes by."""
    parser.add_argument("--precision-aware", action="store_true")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--layers", type=int, default=28, help="28: 1.6 billion parameters")
    parser.add_argument("--fp8", choices=("delayed", "tensorwise", "blockwise"), help="scaling, in Hopper's FP8")
    parser.add_argument("--fp8-param", action="store_true", help="parameters in FP8; else each is cached in it")
    parser.add_argument("--fp32-accumulation", action="store_true", help="fp32 main_grads beside 16-bit buffers")
    parser.add_argument("--frozen", action="store_true", help="train no MLP: outside of DDP's buffers")


class Trainer:
    """The model, its optimizer and its data."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.is_cuda = torch.cuda.is_available()
        if not self.is_cuda:
            from bridge_fgo.tools.standins.cuda import install_standins

            install_standins()
        else:
            from harness.arms.gpu import make_deterministic

            make_deterministic()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.enums import AttnBackend
        from megatron.core.transformer.module import Float16Module

        from harness.arms.rl.trainer import join

        join("cuda" if self.is_cuda else "cpu")
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        parallel_state.initialize_model_parallel()
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        hidden, heads = (2048, 16) if self.is_cuda else (64, 4)
        self.vocab, self.shape = (50304, (2, 1024)) if self.is_cuda else (64, (2, 16))
        more: dict[str, Any] = {}
        if options.experts:
            more |= {"num_moe_experts": options.experts, "moe_router_topk": 2, "moe_ffn_hidden_size": hidden}
        if options.fp8:
            more |= {"fp8": "hybrid", "fp8_recipe": options.fp8, "fp8_param": options.fp8_param}
        config = TransformerConfig(
            num_layers=options.layers if self.is_cuda else 2, hidden_size=hidden, ffn_hidden_size=4 * hidden,
            num_attention_heads=heads, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
            hidden_dropout=0.0, attention_dropout=0.0, attention_backend=AttnBackend.unfused,
            deterministic_mode=self.is_cuda, use_cpu_initialization=not self.is_cuda, **dict.fromkeys(UNUSED, False),
            **more,
        )  # fmt: skip
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=self.is_cuda)
        model = GPTModel(config, spec, self.vocab, self.shape[1], position_embedding_type="rope")
        patterns = ("all",) if options.fp32_accumulation else ()
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=not options.fp32_accumulation,
            param_name_patterns_for_fp32_local_accumulation=patterns,
            fp8_param_gather=options.fp8_param,
        )
        if options.frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad = ".mlp." not in name
        self.ddp = DistributedDataParallel(config, ddp_config, Float16Module(config, model.cuda()))
        settings = OptimizerConfig(
            optimizer="adam", lr=3e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
            use_precision_aware_optimizer=options.precision_aware, fp8_recipe=options.fp8,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(settings, [self.ddp])
        self.device = next(self.ddp.parameters()).device
        self.parameters = sum(parameter.numel() for parameter in self.ddp.parameters())

    def step(self, number: int) -> float:
        """Runs a training step of two microbatches, and returns the sum of their losses."""
        from megatron.core.distributed import finalize_model_grads

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.ddp.module.module.set_is_first_microbatch()
        total = 0.0
        for microbatch in range(2):
            loss = self.loss(number, microbatch)
            loss.backward()
            total += float(loss)
        finalize_model_grads([self.ddp])
        self.optimizer.step()
        return total

    def loss(self, number: int, microbatch: int) -> Any:
        """Returns the loss of a step's microbatch, by a forward."""
        import torch

        generator = torch.Generator().manual_seed(100 * number + microbatch + 10 * self.rank)
        rows, length = self.shape
        row = torch.randint(self.vocab, (rows, length + 1), generator=generator).to(self.device)
        positions = torch.arange(length, device=self.device).expand(rows, length)
        square = torch.ones(length, length, dtype=torch.bool, device=self.device)
        mask = None if self.is_cuda else square.triu(1)[None, None]
        return self.ddp(row[:, :-1], positions, mask, labels=row[:, 1:]).float().mean()

    def sums(self) -> dict[str, int]:
        """Returns sums over the bits of all weights, and of all masters and moments; by no code of the package's."""
        inner = self.optimizer.chained_optimizers[0].optimizer
        states = [tensor for state in inner.state.values() for tensor in state.values()]
        masters = [param for group in inner.param_groups for param in group["params"]]
        return {"params": self.sum_of_weights(), "masters": sum_of(masters), "moments": sum_of(states)}

    def sum_of_weights(self) -> int:
        """Returns a sum over the bits of all weights."""
        weights = [buffer.param_data for buffer in self.ddp.buffers + self.ddp.expert_parallel_buffers]
        return sum_of(weights + [param.data for param in self.ddp.parameters() if not param.requires_grad])


def sum_of(tensors: list[Any]) -> int:
    """Returns a sum over the bits of tensors, each element weighted by its place."""
    import torch

    total = 0
    for tensor in (t for t in tensors if isinstance(t, torch.Tensor) and t.dim()):
        whole = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
        for chunk in tensor.detach().reshape(-1).view(whole).split(2**24):
            places = torch.arange(chunk.numel(), device=chunk.device) % 65521 + 1
            total = (total * 31 + int((chunk.long() * places).sum())) % 2**61
    return total


def memory() -> dict[str, int]:
    """Returns what PyTorch has allocated, and what the driver has free, in bytes."""
    import torch

    if not torch.cuda.is_available():
        return {"allocated": 0, "reserved": 0, "free": 0}
    free, _ = torch.cuda.mem_get_info()
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(), "free": free}


def spoil(sharing: int) -> None:
    """Writes NaNs over most of what the driver has free, and gives it back: what was not brought back is not there.

    sharing: among how many that is divided.
    """
    import torch

    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        torch.full((free * 9 // 10 // sharing,), 0xFF, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        time.sleep(SETTLING_SECONDS)


PHASES = (
    ("offload", ("grads",)),
    ("offload", ("params",)),
    ("offload", ("optimizer",)),
    ("reload", ("params",)),
    ("offload", ("params",)),
    ("reload", ("optimizer",)),
    ("reload", ("params",)),
    ("reload", ("grads",)),
    ("offload", ()),
    ("reload", ("params",)),
    ("offload", ("params",)),
    ("reload", ()),
)


def touch(trainer: Trainer, options: argparse.Namespace) -> dict[str, Any]:
    """Trains three steps, with a sleep after the first and the second, and every use of what is away in it.

    Returns what was refused by name, and what not, beside losses and sums.
    """
    import bridge_fgo

    sys.path.append(str(TESTS / "sleep"))
    from test_touches_while_asleep import USES, Awake

    result: dict[str, Any] = {"refused": {}, "others": {}, "losses": [trainer.step(0)]}
    training = SimpleNamespace(model=[trainer.ddp], optimizer=trainer.optimizer, step=lambda: trainer.step(9))
    residency = bridge_fgo.Residency(trainer.ddp, trainer.optimizer)
    held = Awake(training, Path(tempfile.mkdtemp()))
    for i in (1, 2):
        residency.offload()
        for kind, uses in USES.items():
            for name, use in uses.items():
                try:
                    trainer.step(9) if name == "forward" else use(held)
                    result["others"][name] = "not refused"
                except RuntimeError as error:
                    named = "reload('" in str(error) and (name == "forward" or f"('{kind}')" in str(error))
                    place = result["refused" if named else "others"]
                    place[name] = str(error)[:200]
        residency.reload()
        result["losses"].append(trainer.step(i))
    return {**result, "sums": [trainer.sums()]}


def swap(trainer: Trainer, options: argparse.Namespace) -> dict[str, Any]:
    """Trains three steps; between them keeps weights, swaps them in awake and asleep, and offloads frozen ones alone.

    Returns the bytes and seconds of each call, beside losses, and sums outside of the swaps and in them.
    """
    import torch

    import bridge_fgo

    calls: dict[str, dict[str, float]] = {}
    result: dict[str, Any] = {"calls": calls, "losses": [trainer.step(0)], "sums": [trainer.sums()], "swapped": []}
    frozen = sum(param.numel() for param in trainer.ddp.parameters() if not param.requires_grad)
    result |= {"trained": trainer.parameters - frozen, "frozen": frozen}
    residency = bridge_fgo.Residency(trainer.ddp, trainer.optimizer)

    def call(name: str, act: Callable[[], Any]) -> None:
        free, began = memory()["free"], time.perf_counter()
        moved = act()
        took = {"seconds": time.perf_counter() - began, "returned": memory()["free"] - free}
        counted = {count: getattr(moved, count, 0) for count in ("copied", "freed")}
        calls[name] = {**took, **counted, "pinned": residency.pinned_bytes}

    @torch.no_grad()
    def weights() -> tuple[int, float]:
        return trainer.sum_of_weights(), float(trainer.loss(1, 0))

    def swap_as(name: str) -> None:
        context = residency.weights("first")
        call(f"{name}, in", context.__enter__)
        result["swapped"].append(weights())
        call(f"{name}, out", lambda: context.__exit__(None, None, None))

    result["first"] = weights()
    call("keep", lambda: residency.keep("first"))
    call("keep again", lambda: residency.keep("first"))
    result["losses"].append(trainer.step(1))
    swap_as("awake")
    result["sums"].append(trainer.sums())
    call("frozen out", lambda: residency.offload("params", where=lambda _, param: not param.requires_grad))
    call("frozen back", lambda: residency.reload("params", where=lambda _, param: not param.requires_grad))
    residency.offload()
    swap_as("asleep")
    call("drop", lambda: residency.drop("first"))
    residency.reload()
    result["losses"].append(trainer.step(2))
    return {**result, "sums": [*result["sums"], trainer.sums()]}


def sharded_tensors(trainer: Trainer) -> dict[str, Any]:
    """Returns the state dictionary of a checkpoint."""
    model = trainer.ddp.module.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    return {"model": model, "optimizer": trainer.optimizer.sharded_state_dict(model, metadata=metadata)}


def copies(state: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns key, place and bytes of each tensor that is to be saved."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    tensors = [each for each in nested_values(state) if isinstance(each, ShardedTensor)]
    return [(each.key, each.global_slice(), bits(each.data)) for each in tensors]


def bits(tensor: Any) -> Any:
    """Returns a tensor's bytes on the host."""
    import torch

    return tensor.detach().cpu().clone().reshape(-1).view(torch.uint8)


def read(folder: Path) -> dict[str, Any]:
    """Returns the tensors of a checkpoint, by PyTorch alone."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = checkpoint.FileSystemReader(folder)
    parts = reader.read_metadata().state_dict_metadata.items()
    found = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in parts
        if isinstance(each, TensorStorageMetadata)
    }
    checkpoint.load(found, storage_reader=reader, no_dist=True)
    return found


def save(trainer: Trainer, options: argparse.Namespace) -> dict[str, Any]:
    """Trains nine steps, saves every third in the background, and sleeps after each, while the worker may still write.

    By mcore's `dist_checkpointing`: weights, masters and moments from the GPU. On the CPU the worker is forked.
    """
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy, get_async_strategy

    import bridge_fgo

    calls = get_async_strategy(options.strategy, "AsyncCallsQueue")[1](persistent=trainer.is_cuda)
    strategy = TorchDistSaveShardedStrategy(cached_metadata=options.constant_structure)
    res = bridge_fgo.Residency(trainer.ddp, trainer.optimizer)
    result: dict[str, Any] = {"parameters": trainer.parameters, "stale": {}, "sleeps": [], "warnings": []}
    expected = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(1, 10):
            trainer.step(number)
            if number % 3 == 0:
                state = sharded_tensors(trainer)
                expected[number] = copies(state)
                to = Path(folder) / str(number)
                to.mkdir()
                request = dist_checkpointing.save(
                    state, str(to), strategy, async_sharded_save=True, async_strategy=options.strategy
                )
                del state
                calls.schedule_async_request(request)
                del request
            moved = res.offload()
            sleep = {"step": number, "unfinished": calls.get_num_unfinalized_calls(), "after": memory()}
            result["sleeps"].append({**sleep, "stays": moved.stays, "freed": moved.freed, "returned": moved.returned})
            spoil(1)
            res.reload()
            calls.maybe_finalize_async_calls(blocking=True)
        calls.close()
        result["warnings"] = [str(each.message) for each in said if "still taken" in str(each.message)]
        for number, tensors in expected.items():
            saved = read(Path(folder) / str(number))
            stale = [key for key, place, wanted in tensors if not torch.equal(bits(saved[key][place]), wanted)]
            result["stale"][number] = sorted(set(stale))
            result["tensors"] = len(tensors)
    return result


ACTS = {"touched": touch, "swapped": swap, "saved": save}


def main(arguments: list[str] | None = None) -> None:
    """Runs the arm."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    options = parse(arguments)
    trainer = Trainer(options)
    import torch

    import bridge_fgo

    if options.sleep in ACTS:
        print(json.dumps(ACTS[options.sleep](trainer, options)), flush=True)
        return
    if options.side_stream and trainer.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.Stream())

    result: dict[str, Any] = {"parameters": trainer.parameters, "losses": [], "sums": [], "phases": []}
    res = None
    for number in range(options.steps):
        result["losses"].append(trainer.step(number))
        result["sums"].append(trainer.sums())
        if options.sleep == "never":
            continue
        if res is None:
            config = bridge_fgo.OffloadConfig(engine="native", master_remainders=options.sleep == "packed")
            res = bridge_fgo.Residency(trainer.ddp, trainer.optimizer, config)
            result["pinned"] = [res.pinned_bytes]
        for verb, what in PHASES if number < CYCLES else (("offload", ()), ("reload", ())):
            before = memory()
            moved = getattr(res, verb)(*what)
            figures = {"step": number, "verb": verb, "what": what, "away": sorted(res.away), "before": before}
            result["phases"].append({**figures, "after": memory(), **vars(moved)})
            if len(res.away) == 3 and (number < CYCLES or number % SPOILED_EACH == 0):
                spoil(options.sharing)
        result["pinned"].append(res.pinned_bytes)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
