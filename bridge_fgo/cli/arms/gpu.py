"""One training arm on GPUs: a small GPT through Bridge's own ``pretrain()``, on mock data.

    python -m bridge_fgo.cli.arms.gpu --steps 50 --offload on --events events.jsonl
    torchrun --nproc-per-node 2 -m bridge_fgo.cli.arms.gpu --tp 2 ...

Rank 0 writes the events that ``bridge_fgo.cli.demo`` and the tests read. Digests cover
every rank; bytes and times are rank 0's. Two runs with the same options are bitwise
equal, so that whatever differs between two arms comes from what sets them apart.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_fgo.cli.arms.record import EventWriter, digest
from bridge_fgo.cli.run_script import config_options

if TYPE_CHECKING:
    import torch
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.config import ConfigContainer

# From the 4th step on moments exist, buffers are warm, and every step is like the next.
FIRST_MEASURED_STEP = 4


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options; a combination that makes no sense ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m bridge_fgo.cli.arms.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = parser.add_argument_group("size")
    size.add_argument("--layers", type=int, default=8)
    size.add_argument("--hidden", type=int, default=2048)
    size.add_argument("--ffn", type=int, help="default: 4 times hidden")
    size.add_argument("--heads", type=int, default=16)
    size.add_argument("--vocab", type=int, default=32000)
    size.add_argument("--seq", type=int, default=1024)
    size.add_argument("--mbs", type=int, default=2, help="sequences of a microbatch")
    size.add_argument("--gbs", type=int, default=8, help="sequences of a step, over all ranks")
    size.add_argument("--steps", type=int, default=20)
    spread = parser.add_argument_group("parallelism")
    spread.add_argument("--tp", type=int, default=1)
    spread.add_argument("--pp", type=int, default=1)
    spread.add_argument(
        "--dp-overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="overlap gradient reduction and parameter gathering with computation",
    )
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--precision-aware", action="store_true")
    optimizer.add_argument("--moments-dtype", choices=("fp32", "bf16"), default="fp32")
    optimizer.add_argument("--hybrid", action="store_true", help="the peer arm: Adam on the CPU")
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Bridge's deterministic mode; without it two resident runs may differ already",
    )
    offload = parser.add_argument_group("offload")
    offload.add_argument("--offload", choices=("on", "off"), default="off")
    offload.add_argument("--no-install", action="store_true", help="set the flag, leave this package out")
    offload.add_argument("--engine", choices=("auto", "native", "mcore"))
    offload.add_argument("--fraction", type=float)
    offload.add_argument("--slab-mib", type=int)
    offload.add_argument("--piece-mib", type=int)
    parser.add_argument("--events", type=Path, required=True, help="file to append JSON events to")
    options = parser.parse_args(arguments)
    if options.ffn is None:
        options.ffn = 4 * options.hidden
    if options.moments_dtype != "fp32" and not options.precision_aware:
        parser.error("--moments-dtype bf16 needs --precision-aware")
    if options.hybrid and options.offload == "on":
        parser.error("--hybrid keeps the states on the CPU for good: it does not go with --offload on")
    return options


def build_config(options: argparse.Namespace) -> ConfigContainer:
    """Returns the configuration that ``pretrain()`` runs."""
    import torch
    import torch.nn.functional as F
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as bridge
    from megatron.core.transformer.enums import AttnBackend

    model = GPTModelProvider(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=options.ffn,
        num_attention_heads=options.heads,
        num_query_groups=options.heads // 2 if options.heads % 2 == 0 else options.heads,
        seq_length=options.seq,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        position_embedding_type="rope",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        share_embeddings_and_output_weights=False,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        sequence_parallel=options.tp > 1,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        make_vocab_size_divisible_by=128,
        vocab_size=None,
        gradient_accumulation_fusion=False,  # needs Apex
        # Unfused attention is deterministic, and does not depend on the cuDNN that is here.
        attention_backend=AttnBackend.unfused,
        deterministic_mode=options.deterministic,
        cross_entropy_loss_fusion=not options.deterministic,  # its backward is not deterministic
    )
    optimizer = bridge.OptimizerConfig(
        optimizer="adam",
        bf16=True,
        use_distributed_optimizer=True,
        clip_grad=1.0,
        lr=3e-4,
        min_lr=1e-5,
        weight_decay=0.01,
    )
    if options.precision_aware:
        optimizer.use_precision_aware_optimizer = True
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.moments_dtype]
        optimizer.exp_avg_dtype = optimizer.exp_avg_sq_dtype = dtype
    if options.hybrid:
        # Megatron-LM accepts the hybrid optimizer with the precision-aware one only: without
        # it a second set of fp32 masters stays on the GPU.
        optimizer.use_precision_aware_optimizer = True
        optimizer.optimizer_cpu_offload = True
        optimizer.optimizer_offload_fraction = 1.0
        optimizer.overlap_cpu_optimizer_d2h_h2d = True
    if options.offload == "on":
        # A plain attribute where this mcore has no such field.
        optimizer.offload_optimizer_states = True  # pyright: ignore[reportAttributeAccessIssue]
    return bridge.ConfigContainer(
        model=model,
        train=bridge.TrainingConfig(
            train_iters=options.steps, global_batch_size=options.gbs, micro_batch_size=options.mbs
        ),
        validation=bridge.ValidationConfig(eval_interval=None, eval_iters=0),
        optimizer=optimizer,
        scheduler=bridge.SchedulerConfig(
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
            lr_decay_style="cosine",
            lr_warmup_iters=min(2, options.steps - 1),
            lr_decay_iters=options.steps,
            override_opt_param_scheduler=True,
        ),
        ddp=bridge.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=options.dp_overlap,
            overlap_param_gather=options.dp_overlap,
            use_distributed_optimizer=True,
        ),
        dataset=bridge.MockGPTDatasetConfig(
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=options.seq,
            num_dataset_builder_threads=1,
            data_sharding=True,
            dataloader_type="single",
            num_workers=1,
        ),
        logger=bridge.LoggerConfig(log_interval=1),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=options.vocab),
        checkpoint=bridge.CheckpointConfig(save=None),
        rng=bridge.RNGConfig(seed=1234),
    )


# --- the final state ----------------------------------------------------------------


def distributed_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yields every DistributedOptimizer at or below ``optimizer``, chained ones in their order."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if isinstance(optimizer, DistributedOptimizer):
        yield optimizer
    for child in getattr(optimizer, "chained_optimizers", ()):
        yield from distributed_optimizers(child)


def final_state(model: Sequence[Any], optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Returns this rank's parameters, master weights and moments, each by name.

    Masters are the inner optimizer's parameters, or their ``master_param`` states (fp32,
    or int16 remainders) where the precision-aware optimizer holds them. Looks for them
    itself instead of asking the package: what is compared should not depend on what is
    being tested. Raises RuntimeError where a tensor's memory is released, and where there
    are no masters or moments: equal digests of nothing would prove nothing.
    """
    state: dict[str, dict[str, torch.Tensor]] = {"params": {}, "masters": {}, "moments": {}}
    for chunk, module in enumerate(model):
        for name, parameter in module.named_parameters():
            state["params"][f"{chunk}.{name}"] = parameter
    for number, distributed in enumerate(distributed_optimizers(optimizer)):
        if hasattr(distributed, "synchronize_optimizer_state_for_checkpoint"):
            distributed.synchronize_optimizer_state_for_checkpoint()  # mcore generation 2
        inner = distributed.optimizer
        if inner is None:  # a rank with nothing to train
            continue
        for group, parameters in enumerate(inner.param_groups):
            for index, parameter in enumerate(parameters["params"]):
                name = f"{number}.{group}.{index}"
                states = inner.state.get(parameter, {})
                state["masters"][name] = states.get("master_param", parameter)
                for key in ("exp_avg", "exp_avg_sq"):
                    if key in states:
                        state["moments"][f"{name}.{key}"] = states[key]
    for part, tensors in state.items():
        if not tensors:
            raise RuntimeError(f"found no {part} to compare after training")
        for name, tensor in tensors.items():
            end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
            if tensor.untyped_storage().nbytes() < end:
                raise RuntimeError(f"{part} {name} has no memory after training: it is still released")
    return state


def joined_digests(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    """Returns one digest for each part of the state, over all ranks. Collective; all ranks get it."""
    import torch

    mine = {part: digest(tensors) for part, tensors in state.items()}
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    if len(every) == 1:
        return mine
    return {part: hashlib.sha256("".join(rank[part] for rank in every).encode()).hexdigest() for part in mine}


# --- watching the run ---------------------------------------------------------------


def make_recorder(options: argparse.Namespace) -> Callback:
    """Returns the callback that measures the run and, on rank 0, writes its events."""
    import torch
    from megatron.bridge.training.callbacks import Callback

    import bridge_fgo

    class Recorder(Callback):
        def __init__(self) -> None:
            self.writer: EventWriter | None = None
            self.step = 0
            self.started = 0.0
            self.seconds: list[float] = []
            self.peaks: dict[str, int] = {}

        def on_train_start(self, context: Any) -> None:
            if torch.distributed.get_rank() == 0:
                self.writer = EventWriter(options.events)
                self.writer.start(torch.cuda.get_device_name())

        def on_train_step_start(self, context: Any) -> None:
            self.step += 1
            if self.step == min(FIRST_MEASURED_STEP, options.steps):
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            self.started = time.perf_counter()

        def on_train_step_end(self, context: Any) -> None:
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.started)
            self.sample_peaks()
            loss = (context.loss_dict or {}).get("lm loss")
            loss = None if loss is None else float(loss)
            if options.pp > 1:  # only the last pipeline stage has it, and rank 0 is in the first
                losses: list[Any] = [None] * torch.distributed.get_world_size()
                torch.distributed.all_gather_object(losses, loss)
                loss = next((value for value in losses if value is not None), None)
            if self.writer is not None:
                self.writer.step(
                    step=self.step,
                    loss=loss,
                    grad_norm=None if context.grad_norm is None else float(context.grad_norm),
                    skipped=bool(context.skipped_iter),
                    passes=1,  # the rerun machine is off here: one forward and backward pass
                    seconds=self.seconds[-1],
                )

        def sample_peaks(self) -> None:
            """Takes the newest step's peaks into account.

            The package resets the allocator's peaks between the phases of a step, to tell
            them apart. So its own figures, where it is at work, complete the allocator's.
            """
            if self.step < min(FIRST_MEASURED_STEP, options.steps):
                return
            stats = bridge_fgo.stats()
            forward_backward = 0 if stats is None else stats.peak_forward_backward_bytes or 0
            step = 0 if stats is None else stats.peak_step_bytes or 0
            reserved = 0 if stats is None else stats.peak_reserved_bytes or 0
            newest = {
                "allocated": max(torch.cuda.max_memory_allocated(), forward_backward, step),
                "reserved": max(torch.cuda.max_memory_reserved(), reserved),
                "forward_backward": forward_backward,
                "step": step,
            }
            self.peaks = {name: max(self.peaks.get(name, 0), value) for name, value in newest.items()}

        def on_train_end(self, context: Any) -> None:
            state = final_state(context.model, context.optimizer)
            digests = joined_digests(state)
            if self.writer is None:
                return
            stats = bridge_fgo.stats()
            tensors = [tensor for part in ("masters", "moments") for tensor in state[part].values()]
            self.writer.result(
                digests=digests,
                engine="hybrid" if options.hybrid else None if stats is None else stats.engine,
                state_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                released_bytes=0 if stats is None else stats.released_bytes,
                pinned_bytes=0 if stats is None else stats.pinned_bytes,
                step_seconds=self.seconds,
                **{f"peak_{name}_bytes": value for name, value in self.peaks.items()},
            )

    return Recorder()


# --- running it ---------------------------------------------------------------------


def use_one_rank_by_default() -> None:
    """Lets the arm run without torchrun: sets what Bridge's initialization reads, where unset."""
    if "RANK" in os.environ:
        return
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def be_deterministic() -> None:
    """Sets what Bridge's deterministic mode asks of the environment, where unset.

    Seen on an H200 without it: a 24-layer GPT ended in one of two results, resident or not, depending on
    nothing but timing.
    """
    import torch

    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Filling new memory only shows reads of what nobody wrote, and takes time in every arm.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def skip_building_what_is_built() -> None:
    """Keeps Bridge from building mcore's dataset helpers where the wheel already has them.

    Bridge runs ``make`` in ``megatron/core/datasets`` at every start. The published wheel
    holds the built extension but no Makefile, so that ``pretrain()`` would end the process.
    """
    from megatron.bridge.training import initialize
    from megatron.core import datasets

    folder = Path(datasets.__path__[0])
    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if built and not (folder / "Makefile").exists():
        initialize.compile_helpers = lambda: None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one arm. What goes wrong ends the process with a traceback and a status other than 0."""
    options = parse(arguments)
    use_one_rank_by_default()
    if options.deterministic:
        be_deterministic()
    import bridge_fgo

    if options.offload == "on" and not options.no_install:
        bridge_fgo.install(
            bridge_fgo.OffloadConfig(
                **config_options(
                    engine=options.engine,
                    fraction=options.fraction,
                    slab_mib=options.slab_mib,
                    piece_mib=options.piece_mib,
                )
            )
        )
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    skip_building_what_is_built()
    pretrain(build_config(options), forward_step, callbacks=[make_recorder(options)])


if __name__ == "__main__":
    main()
