"""The engine is chosen by capability, never by a version number."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from bridge_fgo import OffloadConfig
from bridge_fgo.bridge import compat
from bridge_fgo.tools.job.answers import refuse_gpus_at_once
from bridge_fgo.tools.job.builder import as_if_set
from bridge_fgo.tools.job.job import sections_of

FIRST, SECOND = "mcore generation 1", "mcore generation 2"
FRACTION, CHUNKS = {"optimizer_state_offload_fraction": 0.5}, {"optimizer_state_offload_chunk_size_mb": 256}
ADAM = {"optimizer": "adam", "use_distributed_optimizer": True}
ROWS = [
    # which offloader mcore has, OffloadConfig, the optimizer's config, and the engine or what the error says
    *[
        (generation, {"engine": engine}, {}, "native")
        for generation in (None, FIRST, SECOND)
        for engine in ("auto", "native")
    ],
    *[(generation, {"engine": "mcore"}, {}, generation) for generation in (FIRST, SECOND)],
    *[
        (generation, {"engine": engine}, {compat.CHUNK_NUMEL: 8}, ValueError(f"{compat.CHUNK_NUMEL}=8"))
        for generation in (None, FIRST)
        for engine in ("auto", "native", "mcore")
    ],
    (None, {"engine": "mcore"}, {}, ValueError("has no optimizer-state offloader")),
    (FIRST, {"engine": "mcore", "fraction": 0.5}, {}, ValueError("fraction=0.5")),
    # Generation 2's own settings are not dropped by native, and are refused where it is not: a config written for the
    # dev branch would else offload everything there.
    (SECOND, {}, FRACTION | {"optimizer_state_offload_chunk_size_mb": 0}, SECOND),
    (SECOND, {"engine": "native"}, FRACTION, ValueError("optimizer_state_offload_fraction")),
    (SECOND, {"fraction": 0.5}, FRACTION, ValueError("optimizer_state_offload_fraction")),
    *[
        (generation, {"engine": engine}, settings, ValueError("{}={}".format(*settings.copy().popitem())))
        for generation in (None, FIRST)
        for engine in ("auto", "native")
        for settings in (FRACTION, CHUNKS)
    ],
    # Of other optimizers mcore's offloader is not driven.
    *[
        (SECOND, {"engine": engine}, ADAM | FRACTION | other, ValueError(said))
        for other in ({"use_distributed_optimizer": False}, {"optimizer": "dist_muon"})
        for engine, said in (
            ("mcore", "engine='mcore' with optimizer.optimizer="),
            ("auto", "optimizer_state_offload_fraction=0.5"),
        )
    ],
]


@pytest.fixture
def mcore(monkeypatch):
    def use(generation, fused=True):
        monkeypatch.setattr(compat, "upstream_generation", lambda: generation)
        monkeypatch.setattr(compat, "upstream_adam_is_fused", lambda: fused)
        monkeypatch.setattr(compat, "mcore_version", lambda: "0.0")

    return use


@pytest.mark.parametrize(("generation", "ours", "theirs", "expected"), ROWS)
def test_the_engine_that_serves_a_run_or_why_none_does(mcore, generation, ours, theirs, expected):
    mcore(generation)
    if isinstance(expected, str):
        assert compat.choose_engine(OffloadConfig(**ours), SimpleNamespace(**theirs)) == expected
    else:
        with pytest.raises(ValueError, match=re.escape(str(expected))):
            compat.choose_engine(OffloadConfig(**ours), SimpleNamespace(**theirs))


def test_generation_1_with_torchs_adam_is_refused(mcore):
    mcore(FIRST, fused=False)
    with pytest.raises(ValueError, match="FusedAdam"):
        compat.choose_engine(OffloadConfig(engine="mcore"), SimpleNamespace())


@pytest.mark.parametrize(("version", "expected"), [("0.6.2", (0, 6)), ("0.6.0rc1+abc", (0, 6)), ("unknown", (0, 0))])
def test_release_of_a_version(version, expected):
    assert compat.release(version) == expected


@pytest.mark.parametrize("flag", [compat.FLAG, compat.CHUNKED_FLAG])
@pytest.mark.parametrize("value", ["true", 1, 0.0, None])
def test_a_flag_that_is_no_bool_is_refused(flag, value):
    config = SimpleNamespace(**{flag: value})
    assert not compat.flag_is_set(config)
    with pytest.raises(ValueError, match=rf"optimizer\.{flag}={re.escape(repr(value))}"):
        compat.check_flag(config)


@pytest.mark.parametrize("flag", [compat.FLAG, compat.CHUNKED_FLAG])
def test_either_flag_counts_and_generation_2s_fraction_of_zero_moves_nothing_and_is_refused(flag):
    config = SimpleNamespace(**{flag: True})
    assert compat.flag_is_set(config) and not compat.flag_is_set(SimpleNamespace())
    config.optimizer_state_offload_fraction = 0.5
    compat.check_flag(config)
    config.optimizer_state_offload_fraction = 0.0
    with pytest.raises(ValueError, match="optimizer_state_offload_fraction"):
        compat.check_flag(config)
    assert compat.flag_is_set(config) is (flag == compat.FLAG)


def test_a_version_is_told_without_its_local_part_and_as_if_set_leaves_the_config_alone(monkeypatch):
    package = SimpleNamespace(__version__="0.19.2+abc")
    for name, module in (("megatron.core", SimpleNamespace()), ("megatron.core.package_info", package)):
        monkeypatch.setitem(sys.modules, name, module)
    assert compat.mcore_version() == "0.19.2"
    config = SimpleNamespace()
    asked, like = as_if_set(config)
    assert not asked and getattr(like, compat.FLAG) is True and not hasattr(config, compat.FLAG)


def test_settings_of_a_model_that_a_builder_builds_are_found_and_named_where_they_are():
    saved = {"seq_length": 8, "transformer": {"num_layers": 2, "seq_length": 4, "params_dtype": "torch.bfloat16"}}
    model = sections_of({"model": saved}).model
    assert (model.seq_length, model.num_layers, model.params_dtype) == (8, 2, torch.bfloat16)
    nested = SimpleNamespace(seq_length=8, transformer=SimpleNamespace(num_layers=2))
    assert [compat.setting_of(nested, name, 7) for name in ("seq_length", "num_layers", "other")] == [8, 2, 7]
    text = "set model.num_layers=1, model.other=2 or train.num_layers=3"
    expected = "set model.transformer.num_layers=1, model.other=2 or train.num_layers=3"
    assert compat.as_named_in(nested, text) == compat.as_named_in(model, text) == expected
    assert compat.as_named_in(SimpleNamespace(num_layers=2), text) == text


def test_gpus_that_do_not_suit_a_saved_builders_model_are_refused_by_reading(tmp_path):
    path = tmp_path / "run_config.yaml"
    sizes = "tensor_model_parallel_size: 4, context_parallel_size: 1, pipeline_model_parallel_size: 1"
    path.write_text(f"_target_: ConfigContainer\nmodel: {{transformer: {{{sizes}}}}}\n")
    with pytest.raises(ValueError, match="--gpus 6: not divisible by tensor 4"):
        refuse_gpus_at_once(str(path), 6, ())
