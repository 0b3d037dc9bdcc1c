"""`Int8Config`: which layers it names, and what it refuses."""

from __future__ import annotations

import pytest

import scaled_mm as sm


def test_ignored_layers_and_overrides_are_found_by_name_and_pattern():
    config = sm.Int8Config(overrides={r"re:.*down_proj$": {"activation": "dynamic", "smooth": None}, "model.layers.0.mlp.up_proj": None})
    assert config.of("lm_head") is None and config.of("model.layers.3.mlp.gate") is None
    assert config.of("model.layers.3.mlp.gate_proj") is config
    assert config.of("model.layers.0.mlp.up_proj") is None and config.of("model.layers.1.mlp.up_proj") is config
    down = config.of("model.layers.1.mlp.down_proj")
    assert (down.activation, down.smooth, down.clip) == ("dynamic", None, "mse")


def test_the_first_override_that_matches_counts():
    config = sm.Int8Config(overrides={"re:.*proj": {"clip": "absmax"}, "re:.*q_proj": {"clip": "percentile"}})
    assert config.of("model.layers.0.self_attn.q_proj").clip == "absmax"


def test_a_config_survives_its_fields():
    config = sm.Int8Config(activation="static", smooth=None, overrides={"re:a": None, "b": {"symmetric": False}})
    assert sm.Int8Config.from_fields(config.to_fields()) == config


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(activation="int4"), "activation: expected one of 'auto', 'dynamic', 'static', got 'int4'"),
        (dict(clip="max"), "clip: expected one of 'absmax', 'percentile', 'mse', got 'max'"),
        (dict(smooth=1.5), "smooth: expected None or a number from 0 to 1, got 1.5"),
        (dict(smooth=float("nan")), "smooth: expected None or a number"),
        (dict(percentile=50), "percentile: expected a number above 50 and at most 100, got 50"),
        (dict(symmetric="yes"), "symmetric: expected True or False, got 'yes'"),
        (dict(ignore="lm_head"), "ignore: expected a sequence of patterns, got 'lm_head'"),
        (dict(ignore=("re:(",)), r"ignore: expected a regular expression after re:, got 're:\('"),
        (dict(overrides={"a": {"bits": 4}}), "overrides: expected fields out of activation, clip, percentile, smooth, symmetric for 'a'"),
        (dict(overrides={"a": {"clip": "max"}}), "clip: expected one of"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields, message):
    with pytest.raises(sm.ScaledMMError, match=message):
        sm.Int8Config(**fields)


def test_an_unknown_key_of_a_policy_is_refused():
    with pytest.raises(sm.ScaledMMError, match="policy: expected a mapping with keys out of activation, clip, ignore"):
        sm.Int8Config.from_fields({"activations": "static"})
