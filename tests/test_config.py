"""Configs: validated when made, all faults at once, JSON there and back."""

from __future__ import annotations

import json
import pickle

import pytest

from moe_core import Activation, ConfigError, MoEConfig, ParallelConfig, RouterConfig

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_experts": 4, "top_k": 2}


def fields(error: pytest.ExceptionInfo[ConfigError]) -> set[str]:
    return {fault.field for fault in error.value.faults}


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        MoEConfig(
            hidden_size=0,
            intermediate_size=True,  # a bool is no size
            num_experts=4,
            top_k=5,
            w13_layout="gate_upp",
            dtype="int8",
            capacity_factor=-1.0,
            num_shared_experts=-1,
            backend=3,  # pyright: ignore[reportArgumentType]
        )
    assert fields(error) == {
        *("hidden_size", "intermediate_size", "top_k", "w13_layout", "dtype"),
        *("capacity_factor", "num_shared_experts", "backend"),
    }
    assert "did you mean 'gate_up'?" in str(error.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"scoring_func": "sigmoid", "softmax_before_topk": False}, {"softmax_before_topk"}),
        ({"num_expert_group": 4}, {"topk_group"}),
        ({"num_expert_group": 2, "topk_group": 3}, {"topk_group"}),
        ({"group_score": "max"}, {"group_score"}),
        ({"kind": "hash"}, {"vocab_size"}),
        ({"kind": "hash", "vocab_size": 9, "correction_bias": True}, {"correction_bias"}),
        ({"routed_scaling_factor": 0.0}, {"routed_scaling_factor"}),
        ({"routed_scaling_factor": float("nan")}, {"routed_scaling_factor"}),
        ({"renormalize": 1}, {"renormalize"}),
    ],
)
def test_router_faults(values: dict[str, object], expected: set[str]) -> None:
    with pytest.raises(ConfigError) as error:
        RouterConfig(**values)  # pyright: ignore[reportArgumentType]
    assert fields(error) == expected


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_clamps_nothing_or_everything_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError) as error:
        Activation(limit=limit)
    assert fields(error) == {"limit"}


def test_alpha_is_the_gated_silu_form_only() -> None:
    with pytest.raises(ConfigError) as error:
        Activation(name="gelu", gated=False, alpha=1.702)
    assert fields(error) == {"alpha"}
    with pytest.raises(ConfigError) as error:
        Activation(alpha=1.702, limit=7.0, limit_form="after")
    assert fields(error) == {"limit_form"}


def test_groups_must_fit_the_experts() -> None:
    with pytest.raises(ConfigError) as error:
        MoEConfig(**SIZES, router=RouterConfig(num_expert_group=3, topk_group=1))
    assert fields(error) == {"router.num_expert_group"}
    with pytest.raises(ConfigError, match=r"can't give top_k=2") as error:
        MoEConfig(**SIZES, router=RouterConfig(num_expert_group=4, topk_group=1))
    assert fields(error) == {"router.topk_group"}


def test_a_nested_config_that_is_a_string_is_told_how_it_is_set() -> None:
    with pytest.raises(ConfigError, match=r"such as activation\.name=silu") as error:
        MoEConfig.from_dict(SIZES | {"activation": "gelu"})
    assert fields(error) == {"activation"}


def test_json_round_trip() -> None:
    config = MoEConfig(
        **SIZES,
        router=RouterConfig(scoring_func="sqrtsoftplus", correction_bias=True),
        activation=Activation(limit=10.0),
        num_shared_experts=1,
        dtype="bfloat16",
    )
    assert MoEConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_and_missing_keys_are_faults_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as error:
        MoEConfig.from_dict(
            {
                "hiden_size": 8,
                "num_experts": 4,
                "top_k": 2,
                "router": {"renormalise": True, "kind": "topp"},
                "activation": {"limit": -1},
            }
        )
    assert fields(error) == {
        *("hiden_size", "hidden_size", "intermediate_size"),
        *("router.renormalise", "router.kind", "activation.limit"),
    }
    assert "did you mean 'hidden_size'?" in str(error.value)
    assert "did you mean 'renormalize'?" in str(error.value)


def test_a_torch_dtype_is_taken() -> None:
    torch = pytest.importorskip("torch")
    assert MoEConfig(**SIZES, dtype=torch.bfloat16).dtype == "bfloat16"


def test_config_files(tmp_path) -> None:
    good = tmp_path / "good.json"
    good.write_text(json.dumps(SIZES))
    assert MoEConfig.from_json(good) == MoEConfig(**SIZES)
    for text, message in (("{", "is not JSON"), ("[1]", "must hold a JSON object")):
        bad = tmp_path / "bad.json"
        bad.write_text(text)
        with pytest.raises(ConfigError, match=message):
            MoEConfig.from_json(bad)
    with pytest.raises(ConfigError, match="can't be read"):
        MoEConfig.from_json(tmp_path / "absent.json")


def test_configs_are_frozen_hashable_and_pickle() -> None:
    config = MoEConfig(**SIZES)
    with pytest.raises(AttributeError):
        config.top_k = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert {config: 1}[pickle.loads(pickle.dumps(config))] == 1


def test_widths() -> None:
    assert ParallelConfig(ep_size=4, tp_size=2, dp_size=3).world_size == 24
    with pytest.raises(ConfigError) as error:
        ParallelConfig(ep_size=0, tp_size=-1)
    assert fields(error) == {"ep_size", "tp_size"}


def test_shared_size_counts_every_shared_expert() -> None:
    assert MoEConfig(**SIZES).shared_size == 0
    assert MoEConfig(**SIZES, num_shared_experts=2).shared_size == 32
    assert MoEConfig(**SIZES, num_shared_experts=2, shared_intermediate_size=5).shared_size == 10
