"""Configs for the model builder, and a process that builds several of them: imports alone take ten seconds.

python tests/tools/built_jobs.py NAME...
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
from test_plan_measured import RUNS

from bridge_fgo.tools.bench.presets import PRESETS

SMALL = "--layers 8 --hidden 256 --ffn 512 --heads 8 --seq 128 --vocab 1000 --mbs 1 --gbs 16"
GPUS = {
    "dense": 16, "moe": 16, "latent": 4, "biased": 4, "mxfp8": 4, "fsdp": 8, "tensor_parallel_fsdp": 8,
    "pipelined_fsdp": 8, "dist_muon": 4, "refused": None, "unsized": 1, "one_microbatch": 1, "two_microbatches": 1,
    "interleaved": 2,
}  # fmt: skip

OVERRIDES = {"refused": ["optimizer.optimizer_cuda_graph=true"]}


def config(options: str, **model: object):
    from bridge_fgo.tools.arms import gpu
    from bridge_fgo.tools.arms.gpu_config import build_config

    result = build_config(gpu.parse(f"{options} --no-deterministic --fused-loss --offload on --events unused".split()))
    for name, value in model.items():
        assert hasattr(result.model, name), name
        setattr(result.model, name, value)
    return result


def dense():
    return config(f"{SMALL} --tp 2 --pp 2", virtual_pipeline_model_parallel_size=2, qk_layernorm=True)


def block_spec():
    from functools import partial

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return partial(get_gpt_decoder_block_spec, use_transformer_engine=True)


def moe():
    model = {"moe_layer_freq": [0, 1] * 4, "moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": 128}
    return config(f"{SMALL} --experts 8 --ep 4 --pp 2", transformer_layer_spec=block_spec(), **model)


def latent():
    from megatron.bridge.models.mla_provider import MLAModelProvider

    result = config(SMALL)
    fields = {name: value for name, value in vars(result.model).items() if not name.startswith("_")}
    names = MLAModelProvider.__dataclass_fields__
    result.model = MLAModelProvider(
        **{n: v for n, v in fields.items() if n in names and names[n].init and v is not None}
    )
    result.model.multi_latent_attention = True  # the fields above say that it is not
    result.model.transformer_layer_spec = block_spec()  # Bridge's default spec has no latent attention
    result.model.q_lora_rank, result.model.kv_lora_rank = 96, 64
    result.model.qk_layernorm = True
    return result


def biased():
    return config(f"{SMALL} --pp 2", normalization="LayerNorm", add_bias_linear=True, gated_linear_unit=False,
                  activation_func=torch.nn.functional.gelu, share_embeddings_and_output_weights=True)  # fmt: skip


def mxfp8():
    from megatron.bridge.training.mixed_precision import bf16_with_mxfp8_mixed

    result = config(f"{SMALL} --precision-aware --moments-dtype bf16")
    result.mixed_precision = bf16_with_mxfp8_mixed()
    return result


def fsdp():
    return config(f"{SMALL} --fsdp optim_grads_params --experts 8 --ep 2")


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


def one_microbatch():
    return config(f"{PRESETS['short']} --gbs 2")


def two_microbatches():
    return config(f"{PRESETS['long']} --layers 14 --gbs 6")


def interleaved():
    return config(f"{PRESETS['short']} --gbs 16 --pp 2 --vpp 2")


MEASURED = {}
for number, (run, (options, gpus, *_)) in enumerate(RUNS.items()):
    MEASURED[run] = name = f"measured_{number}"
    globals()[name], GPUS[name] = partial(config, options), gpus


def main() -> None:
    from bridge_fgo.tools.job import builder
    from bridge_fgo.tools.standins import te_shapes

    te_shapes.install()
    sys.path.insert(0, str(Path(__file__).parent))
    found = {}
    for name in sys.argv[2:]:
        request = {"target": f"built_jobs:{name}", "gpus": GPUS[name], "offload": {}, "vocab_size": None}
        found[name] = builder.answer({**request, "patches": False, "overrides": OVERRIDES.get(name, [])})
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
