"""Jobs that Megatron's builder makes without a GPU, each once: of the arms' own options, or of the functions here."""

import json
from functools import cache, partial

from bridge_fgo.tools.job.answers import ask_builder
from bridge_fgo.tools.job.job import Job, job_of
from harness.arms import gpu

SMALL = "--layers 8 --hidden 256 --ffn 512 --heads 8 --seq 128 --vocab 1000 --mbs 1 --gbs 16 --offload on"
FSDP = f"{SMALL} --fsdp optim_grads_params"


def job(name: str, gpus: int | None = 1, *overrides: str) -> Job:
    """Return a job as `plan` knows it; name: options of an arm on a GPU, or of a function here."""
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
    return partial(config, *options.split())


def parsed(*options: str):
    """Return the options of an arm."""
    return gpu.parse([*options, "--events", "unused"])


def config(*options: str):
    """Return the config that an arm of these options makes."""
    return gpu.build_config(parsed(*options))


def without_layers():
    result = config(*SMALL.split())
    result.model.transformer_layer_spec = None
    return result


def latent(options: str, q_lora_rank: int = 96, kv_lora_rank: int = 64, **model: object):
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    result = config(*options.split())
    names = MLAModelProvider.__dataclass_fields__
    fields = {name: value for name, value in vars(result.model).items() if name in names and names[name].init}
    result.model = MLAModelProvider(**{name: value for name, value in fields.items() if value is not None})
    result.model.multi_latent_attention = True  # the fields above say that it is not
    # Bridge's default spec has no latent attention.
    result.model.transformer_layer_spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
    settings = {"q_lora_rank": q_lora_rank, "kv_lora_rank": kv_lora_rank, "qk_layernorm": True, **model}
    vars(result.model).update(settings)
    return result


def latent_fsdp():
    return latent(FSDP)


def latent_experts():
    options = "--layers 4 --hidden 1024 --heads 16 --seq 1024 --mbs 2 --gbs 4 --experts 4 --topk 2 --grouped-experts"
    heads = {"num_query_groups": 16, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 64}
    return latent(options, q_lora_rank=384, kv_lora_rank=256, **heads)


def adapters(*options: str):
    from megatron.bridge.peft.lora import LoRA

    result = config(*SMALL.split(), *options)
    result.peft = LoRA(dim=8)
    return result


def adapters_of_experts():
    return adapters("--experts", "8", "--ep", "2", "--grouped-experts")
