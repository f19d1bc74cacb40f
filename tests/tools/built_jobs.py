"""Jobs that Megatron's builder makes without a GPU, each once: of the functions here, or of the arms' own options."""

import json
from functools import cache, partial

from bridge_fgo.tools.bench.presets import PRESETS
from bridge_fgo.tools.job.answers import ask_builder
from bridge_fgo.tools.job.job import Job, job_of

SMALL = "--layers 8 --hidden 256 --ffn 512 --heads 8 --seq 128 --vocab 1000 --mbs 1 --gbs 16"


def job(name: str, gpus: int | None = 1, *overrides: str) -> Job:
    """Return a job as `plan` knows it; name: of a function here, or options of an arm on a GPU."""
    return job_of(answer(name, gpus, *overrides))


def answer(name: str, gpus: int | None = 1, *overrides: str) -> dict:
    """Return what the builder says of a job."""
    return json.loads(_answer(name, gpus, overrides))


@cache
def _answer(name: str, gpus: int | None, overrides: tuple[str, ...]) -> str:
    return json.dumps(ask_builder(f"{__file__}:{name}", gpus, overrides=overrides))


def __getattr__(options: str):
    if not options.startswith("--"):
        raise AttributeError(options)
    return partial(_config, options)


def _config(options: str):
    from bridge_fgo.tools.arms import gpu
    from bridge_fgo.tools.arms.gpu import build_config

    return build_config(gpu.parse(f"{options} --events unused".split()))


def config(options: str, **model: object):
    result = _config(f"{options} --no-deterministic --fused-loss --offload on")
    for name, value in model.items():
        assert hasattr(result.model, name), name
        setattr(result.model, name, value)
    return result


def dense():
    return config(f"{SMALL} --tp 2 --pp 2", virtual_pipeline_model_parallel_size=2, qk_layernorm=True)


def without_layers():
    return config(SMALL, transformer_layer_spec=None)


def block_spec():
    from functools import partial

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return partial(get_gpt_decoder_block_spec, use_transformer_engine=True)


def moe():
    model = {"moe_layer_freq": [0, 1] * 4, "moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": 128}
    return config(f"{SMALL} --experts 8 --ep 4 --pp 2", transformer_layer_spec=block_spec(), **model)


def latent(result=None, q_lora_rank=96, kv_lora_rank=64, **model):
    from megatron.bridge.models.mla_provider import MLAModelProvider

    result = result or config(SMALL)
    fields = {name: value for name, value in vars(result.model).items() if not name.startswith("_")}
    names = MLAModelProvider.__dataclass_fields__
    result.model = MLAModelProvider(
        **{n: v for n, v in fields.items() if n in names and names[n].init and v is not None}
    )
    result.model.multi_latent_attention = True  # the fields above say that it is not
    result.model.transformer_layer_spec = block_spec()  # Bridge's default spec has no latent attention
    settings = {"q_lora_rank": q_lora_rank, "kv_lora_rank": kv_lora_rank, "qk_layernorm": True, **model}
    vars(result.model).update(settings)
    return result


def latent_experts():
    options = "--layers 4 --hidden 1024 --heads 16 --seq 1024 --mbs 2 --gbs 4 --experts 4 --topk 2 --grouped-experts"
    heads = {"num_query_groups": 16, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 64}
    return latent(_config(options), q_lora_rank=384, kv_lora_rank=256, **heads)


def mxfp8():
    from megatron.bridge.training.mixed_precision import bf16_with_mxfp8_mixed

    result = config(f"{SMALL} --precision-aware --moments-dtype bf16")
    result.mixed_precision = bf16_with_mxfp8_mixed()
    return result


def fsdp():
    return config(f"{SMALL} --fsdp optim_grads_params --experts 8 --ep 2")


def dense_fsdp():
    return config(f"{SMALL} --fsdp optim_grads_params")


def quantized_fsdp():
    from megatron.bridge.training.mixed_precision import bf16_with_fp8_current_scaling_mixed

    result = dense_fsdp()
    result.mixed_precision, result.ddp.nccl_ub = bf16_with_fp8_current_scaling_mixed(), True
    result.mixed_precision.fp8_param_gather = True
    return result


def tensor_parallel_fsdp():
    return config(f"{SMALL} --fsdp optim_grads_params --tp 2")


def pipelined_fsdp():
    return config(f"{SMALL} --fsdp optim_grads_params --pp 2")


def dist_muon():
    result = config(f"{SMALL} --no-distributed")
    result.optimizer.optimizer = "dist_muon"
    return result


def refused():
    result = config(SMALL)
    result.dist.use_torch_fsdp2 = True
    return result


def unsized():
    result = config(SMALL)
    result.model.vocab_size = result.tokenizer.vocab_size = None
    return result


def latent_fsdp():
    result = latent()
    result.ddp, result.dist, result.checkpoint = (getattr(fsdp(), name) for name in ("ddp", "dist", "checkpoint"))
    return result


def offloads_activations():
    return config(SMALL, cpu_offloading=True, cpu_offloading_num_layers=2)


def one_microbatch():
    return config(f"{PRESETS['short']} --gbs 2")


def two_microbatches():
    return config(f"{PRESETS['long']} --layers 14 --gbs 6")


def interleaved():
    return config(f"{PRESETS['short']} --gbs 16 --pp 2 --vpp 2")
