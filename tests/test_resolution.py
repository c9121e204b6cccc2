"""Choosing: precedence, every refusal of every candidate, debts paid once, nothing silent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_core import ConfigError, MoEConfig, ParallelConfig, RouterConfig, resolve
from moe_core.capabilities import Candidate, Path, Refusal, find_path, part_refusals
from moe_core.manifest import Backend, BackendVersionError, Offer, Part, Range, Request
from moe_core.registry import get, register_backend, unregister_backend

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_experts": 4, "top_k": 2}
CONFIG = MoEConfig(**SIZES)


@pytest.fixture
def install():
    """Registers backends for one test."""
    names: list[str] = []

    def add(name: str, *parts: dict[str, Any]) -> None:
        register_backend({"name": name, "api": "1.0", "parts": list(parts)})
        names.append(name)

    yield add
    for name in names:
        unregister_backend(name)


RUNNER = {
    "role": "runner",
    "target": "nowhere:Runner",
    "takes": ["expert_contiguous"],
    "gives": ["expert_contiguous"],
    "offer": {"autograd": True},
}
TRANSPORT = {
    "role": "transport",
    "target": "nowhere:Transport",
    "takes": ["slot_major"],
    "gives": ["token_major"],
    "pays": ["rank_sum", "tp_sum"],
    "may_pay": ["weight", "slot_sum"],
    "offer": {"autograd": True},
}


def test_auto_prefers_torch_over_the_reference() -> None:
    found = resolve(CONFIG)
    assert (found.ok, found.name, found.source) == (True, "torch", "auto")
    assert found.parts["router"].backend.name == "torch"


def test_precedence_argument_config_environment_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    configured = MoEConfig(**SIZES, backend="reference")
    assert (resolve(configured, None, "torch").name, "argument") == ("torch", "argument")
    monkeypatch.setenv("MOE_BACKEND", "torch")
    for config, argument, name, source in (
        (configured, "torch", "torch", "argument"),
        (configured, None, "reference", "config"),
        (CONFIG, None, "torch", "MOE_BACKEND"),
    ):
        found = resolve(config, None, argument)
        assert (found.name, found.source) == (name, source)
    monkeypatch.setenv("MOE_BACKEND", "reference")
    assert resolve(CONFIG).name == "reference"


def test_transport_plus_runner() -> None:
    found = resolve(CONFIG, None, "reference+torch")
    assert found.name == "reference+torch"
    assert [c.name for c in found.converters] == ["permute"]
    assert resolve(CONFIG, None, "reference").converters == ()


def test_an_explicit_name_that_cannot_serve_is_an_error_with_every_reason() -> None:
    config = MoEConfig(**SIZES, quant="fp8")
    found = resolve(config, ParallelConfig(ep_size=2), "torch")
    assert not found.ok
    axes = {(r.part, r.axis) for r in found.refusals}
    assert {
        ("torch.transport", "ep_size"),
        ("torch.runner", "quant"),
    } <= axes
    assert "wanted 2, offers 1" in found.why_not()
    with pytest.raises(ConfigError, match=r"torch\.runner"):
        raise ConfigError(found)


def test_a_refused_name_is_told_what_would_work(install) -> None:
    install("slow", RUNNER | {"offer": {"autograd": False}})
    found = resolve(CONFIG, None, "slow")
    assert not found.ok
    assert found.would_work == "torch"
    assert "backend='auto' would choose 'torch'" in found.why_not()
    assert [(r.part, r.axis) for r in found.refusals] == [("slow.runner", "autograd")]
    assert resolve(CONFIG, None, "slow", autograd=False).ok


def test_a_preference_may_depend_on_the_device(install) -> None:
    offer = {"device": ["cpu", "cuda"], "autograd": True}
    fast = {"offer": offer, "preference": {"cuda": 99}}
    install("fast", RUNNER | fast, TRANSPORT | fast)
    chosen = {device: resolve(CONFIG, device=device).name for device in ("cpu", "cuda")}
    assert chosen == {"cpu": "torch", "cuda": "fast"}


def test_a_list_is_tried_in_order_and_says_why(install) -> None:
    install("slow", RUNNER | {"offer": {}})
    found = resolve(CONFIG, None, "absent,slow,reference,torch")
    assert found.name == "reference"
    assert [(r.part, r.code) for r in found.refusals] == [
        ("absent", "unknown"),
        ("slow.runner", "axis"),
    ]


def test_options_reach_the_part_that_knows_them() -> None:
    found = resolve(CONFIG, None, "torch[gemm=loop]")
    assert found.ok
    assert found.parts["runner"].options == {"gemm": "loop"}
    assert found.parts["transport"].options == {}
    wrong = resolve(CONFIG, None, "torch[gem=loop]")
    assert {r.code for r in wrong.refusals} == {"option"}
    assert "did you mean 'gemm'?" in wrong.why_not()
    assert "did you mean 'loop'?" in resolve(CONFIG, None, "torch[gemm=lop]").why_not()


def test_modes_tell_parts_of_one_role_apart(install) -> None:
    normal = TRANSPORT | {"mode": "normal", "offer": {"autograd": True}}
    low = TRANSPORT | {"mode": "low_latency", "offer": {}}
    install("two", normal, low)
    assert resolve(CONFIG, None, "two").parts["transport"].part.mode == "normal"
    assert resolve(CONFIG, None, "two[mode=low_latency]", autograd=False).name == "two+torch"
    refused = resolve(CONFIG, None, "two[mode=fast]")
    assert [(r.axis, r.wanted, r.offered) for r in refused.refusals] == [
        ("mode", "fast", "normal, low_latency")
    ]


def test_a_missing_package_is_a_refusal_with_the_way_to_get_it(install) -> None:
    install("needy", RUNNER | {"needs": ["no_such_package>=2"]})
    found = resolve(CONFIG, None, "needy")
    assert [(r.code, r.axis) for r in found.refusals] == [("needs", "no_such_package>=2")]
    assert "pip install" in found.refusals[0].fix


def test_a_runner_first_in_a_pair_is_refused(install) -> None:
    install("only_runner", RUNNER)
    found = resolve(CONFIG, None, "only_runner+torch")
    assert next((r.part, r.axis, r.offered) for r in found.refusals) == (
        "only_runner",
        "role",
        "runner",
    )


def candidate(**fields: Any) -> Candidate:
    part = Part(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    return Candidate(Backend(name="x", parts=(part,)), part, "d", "1")


def test_layouts_that_do_not_meet_are_refused_by_name() -> None:
    t = candidate(
        **TRANSPORT | {"takes": ("expert_masked",), "gives": ("expert_masked",), "offer": Offer()}
    )
    r = candidate(**RUNNER | {"offer": Offer()})
    (refusal,) = find_path(t, r, Request())  # pyright: ignore[reportGeneralTypeIssues]
    assert (refusal.code, refusal.axis) == ("no_path", "layout")
    assert "expert_masked" in refusal.wanted


def test_rows_are_not_copied_where_a_runner_gathers_them() -> None:
    wants = {"takes": ["slot_major"], "gives": ["token_major"], "may_pay": ["weight", "slot_sum"]}
    t = candidate(**TRANSPORT | wants | {"offer": Offer()})
    ports = {
        "takes": ["expert_contiguous", "indexed"],
        "gives": ["expert_contiguous", "slot_major"],
    }
    path = find_path(t, candidate(**RUNNER | ports | {"offer": Offer()}), Request())
    assert isinstance(path, Path)
    assert path.converter is not None
    assert (path.converter.name, path.runner_in, path.runner_out) == (
        "index",
        "indexed",
        "slot_major",
    )


def debts(
    transport: dict[str, Any], runner: dict[str, Any], **request: Any
) -> Path | list[Refusal]:
    base = {"offer": Offer()}
    return find_path(
        candidate(**{**TRANSPORT, **base, **transport}),
        candidate(**{**RUNNER, **base, **runner}),
        Request(**request),
    )


def test_every_debt_has_exactly_one_payer() -> None:
    path = debts({}, {})
    assert isinstance(path, Path)
    assert path.payers == dict.fromkeys(("weight", "slot_sum", "rank_sum", "tp_sum"), "transport")
    twice = debts(
        {"pays": ("weight", "rank_sum", "tp_sum"), "may_pay": ("slot_sum",)}, {"pays": ("weight",)}
    )
    assert isinstance(twice, list)
    assert [(r.code, r.axis, r.offered) for r in twice] == [("debt", "weight", "paid twice")]
    never = debts({"may_pay": ("slot_sum",)}, {})
    assert isinstance(never, list)
    assert [(r.axis, r.offered) for r in never] == [("weight", "not paid")]
    unsummed = debts({"may_pay": ("weight",)}, {"pays": ("slot_sum",)})
    assert isinstance(unsummed, list)  # rows per slot can't be summed already
    assert unsummed[0].axis == "slot_sum"


def test_the_weight_on_input_is_the_runners() -> None:
    path = debts({}, {"may_pay": ("weight",)}, weight_on_input=True)
    assert isinstance(path, Path)
    assert path.payers["weight"] == "runner"
    late = debts({}, {}, weight_on_input=True)
    assert isinstance(late, list)
    assert late[0].axis == "weight"


@pytest.mark.parametrize(
    ("axis", "wanted", "offered", "serves"),
    [
        ("dtype", "float32", ("float32", "bfloat16"), True),
        ("dtype", "float16", ("float32",), False),
        ("gated", False, (True,), False),
        ("gated", False, (True, False), True),
        ("bias", False, False, True),
        ("bias", True, False, False),
        ("hidden_size", 256, Range(min=128, max=512, multiple_of=128), True),
        ("hidden_size", 200, Range(min=128, multiple_of=128), False),
        ("hidden_size", 64, Range(min=128), False),
        ("hidden_size", 1024, Range(max=512), False),
        ("hidden_size", 2880, (2048, 2560), False),
    ],
)
def test_axes(axis: str, wanted: object, offered: object, serves: bool) -> None:
    part = candidate(**RUNNER | {"offer": Offer(**{"autograd": True, axis: offered})})
    refusals = part_refusals(part, Request(**{axis: wanted}))
    assert [r.axis for r in refusals] == ([] if serves else [axis])


def test_an_axis_of_another_role_does_not_matter() -> None:
    part = candidate(**RUNNER | {"offer": Offer(autograd=True)})
    assert part_refusals(part, Request(combine="per_slot", ep_size=64, router="hash")) == []


def test_a_check_can_refuse_and_its_bugs_are_not_refusals(install, tmp_path, monkeypatch) -> None:
    (tmp_path / "their_checks.py").write_text(
        "def even(request, options):\n"
        "    if request.num_experts % 2:\n"
        "        return [('num_experts', str(request.num_experts), 'even', 'add an expert')]\n"
        "    return []\n"
        "def broken(request, options):\n"
        "    raise KeyError('oops')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    install("even", RUNNER | {"check": "their_checks:even"})
    install("broken", RUNNER | {"check": "their_checks:broken"})
    assert resolve(CONFIG, None, "even").ok
    odd = MoEConfig(**SIZES | {"num_experts": 5})
    assert [r.code for r in resolve(odd, None, "even").refusals] == ["check"]
    with pytest.raises(ImportError, match="KeyError: 'oops'"):
        resolve(CONFIG, None, "broken")


def test_the_result_is_json_and_its_fingerprint_follows_what_runs(install) -> None:
    first, again = resolve(CONFIG), resolve(CONFIG, None, "torch")
    assert json.loads(json.dumps(first.to_dict()))["name"] == "torch"
    assert first.fingerprint == again.fingerprint  # where a spec came from doesn't matter
    others = [
        resolve(CONFIG, None, "reference"),
        resolve(CONFIG, None, "torch[gemm=loop]"),
        resolve(MoEConfig(**SIZES, router=RouterConfig(renormalize=True)), None, "reference+torch"),
        resolve(MoEConfig(**SIZES, dtype="bfloat16")),
    ]
    assert len({r.fingerprint for r in [first, *others]}) == 5


def test_manifests_are_checked_as_a_whole() -> None:
    with pytest.raises(ConfigError) as error:
        Backend.from_dict(
            {
                "name": "x",
                "api": "1.0",
                "partz": [],
                "parts": [
                    {"role": "runer", "target": "x", "pays": ["weigth"]},
                    {"role": "runner", "target": "x:y", "offer": {"dtyp": ["float32"]}},
                    {"role": "runner", "target": "x:y", "takes": ["token_major"], "gives": []},
                ],
            }
        )
    fields = {f.field for f in error.value.faults}
    assert {"partz", "parts[0].role", "parts[0].target", "parts[0].pays"} <= fields
    assert {"parts[1].offer.dtyp", "parts[2].takes"} <= fields


@pytest.mark.parametrize("api", ["2.0", "1.1", "0.9", "one"])
def test_the_api_is_read_before_anything_else(api: str) -> None:
    with pytest.raises(BackendVersionError):
        Backend.from_dict({"name": "x", "api": api, "a_key_from_the_future": 1})


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"offer": {"hidden_size": {"min": "8"}}}, "offer.hidden_size.min"),
        ({"offer": {"hidden_size": {"multiple_of": 0}}}, "offer.hidden_size.multiple_of"),
        ({"offer": {"hidden_size": {"min": 4, "max": 2}}}, "offer.hidden_size.max"),
        ({"offer": {"dtype": True}}, "offer.dtype"),
        ({"offer": {"dtype": "float32"}}, "offer.dtype"),
        ({"offer": {"dtype": [32]}}, "offer.dtype"),
        ({"offer": {"bias": ["yes"]}}, "offer.bias"),
        ({"offer": {"gated": [1]}}, "offer.gated"),
        ({"offer": []}, "offer"),
        ({"preference": "high"}, "preference"),
        ({"preference": {"cuda": True}}, "preference"),
        ({"takes": "expert_contiguous"}, "takes"),
        ({"options": {"gemm": "auto"}}, "options"),
        ({"options": {"gemm": []}}, "options"),
        ({"check": "nowhere"}, "check"),
        ({"needs": [1]}, "needs"),
    ],
)
def test_values_of_the_wrong_kind_are_faults_of_the_manifest(
    part: dict[str, Any], field: str
) -> None:
    """They would else come up as errors of whatever compares them, for every layer there is."""
    data = {"name": "x", "api": "1.0", "parts": [RUNNER | part]}
    with pytest.raises(ConfigError) as error:
        Backend.from_dict(data)
    assert f"parts[0].{field}" in {f.field for f in error.value.faults}


def test_a_backend_is_json_there_and_back() -> None:
    for name in ("torch", "nccl", "reference"):
        backend = get(name).backend
        assert Backend.from_dict(json.loads(json.dumps(backend.to_dict()))) == backend
