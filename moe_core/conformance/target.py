"""What is put to the test: the parts that a spec names, what they offer, and requests that fit.

Tests reach a backend through its spec only, so what is tested is what a user of that spec gets.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import pytest
import torch

from moe_core import registry
from moe_core.capabilities import Candidate
from moe_core.config import DTYPES, MoEConfig, ParallelConfig
from moe_core.environment import requirement_fault
from moe_core.errors import ConfigError, Fault
from moe_core.manifest import ROLE_AXES, ROLES, Range, meets
from moe_core.resolution import Resolution, resolve
from moe_core.spec import NamedBackend, parse_spec

if TYPE_CHECKING:
    from collections.abc import Callable

NOT_CLAIMED = "not claimed: "
"""How the reason of a skip begins where the manifest doesn't offer it (and refused it)."""
NOT_HERE = "not checkable here: "
"""Where this machine lacks what the check needs."""
SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_experts": 4, "top_k": 2}
PREFERRED = ("float32", "float64", "bfloat16", "float16")


class Target:
    """One spec on one kind of device. Raises ``ConfigError`` for a spec that names no one backend,
    and what ``registry.get`` raises for one that isn't installed or can't be loaded."""

    def __init__(self, spec: str, device: str = "cpu") -> None:
        self.spec, self.device, self.parallel = spec, device, ParallelConfig()
        alternatives = parse_spec(spec).alternatives
        if len(alternatives) != 1 or not alternatives[0].names:
            message = "conformance is of one backend: NAME, NAME[key=value] or TRANSPORT+RUNNER"
            raise ConfigError([Fault("backend", spec, message)])
        self.names = alternatives[0].names
        sides = [("transport",), ("runner",)] if len(self.names) == 2 else [ROLES]
        found = [
            (name, candidate)
            for name, roles in zip(self.names, sides, strict=True)
            for candidate in _candidates(name)
            if candidate.part.role in roles
        ]
        self.parts = tuple(candidate for _, candidate in found)
        self.roles = tuple(r for r in ROLES if any(c.part.role == r for c in self.parts))
        missing = [role for side in sides if len(side) == 1 for role in side]
        missing = [role for role in missing if role not in self.roles]
        if missing or not self.parts:
            message = f"offers no {' or '.join(missing) or 'such part'}"
            raise ConfigError([Fault("backend", spec, message)])
        self._pinned = {id(c): self._pin(name, c) for name, c in found}

    def _pin(self, name: NamedBackend, candidate: Candidate) -> str:
        mode = {"mode": candidate.part.mode} if candidate.part.mode else {}
        own = NamedBackend(name.name, name.distribution, {**name.options, **mode})
        return "+".join(str(own if n is name else n) for n in self.names)

    def of(self, role: str) -> list[Candidate]:
        return [c for c in self.parts if c.part.role == role]

    def pinned(self, candidate: Candidate) -> str:
        """The spec that chooses this part among several of its role (by its mode)."""
        return self._pinned[id(candidate)]

    def unavailable(self, role: str) -> str:
        """Why no part of this role can run here, or nothing."""
        reasons = [reason for c in self.of(role) if (reason := _missing(c, self.device))]
        return "; ".join(dict.fromkeys(reasons)) if len(reasons) == len(self.of(role)) else ""

    def offers(self, axis: str, value: Any) -> bool:
        """Whether every role has a part that offers it, as far as the axis concerns the role."""
        return all(
            any(meets(value, getattr(c.part.offer, axis)) for c in self.of(role))
            for role in self.roles
            if axis in ROLE_AXES[role]
        )

    @property
    def dtypes(self) -> list[str]:
        return [d for d in PREFERRED if self.offers("dtype", d)]

    @functools.cached_property
    def autograd(self) -> bool:
        return self.offers("autograd", True)

    def fit(self, axis: str, wanted: int) -> int:
        """The offered value next to ``wanted``: the least above it, else the largest."""
        for _ in range(8):  # until all parts agree
            for c in self.parts:
                if axis in ROLE_AXES[c.part.role]:
                    wanted = _nearest(getattr(c.part.offer, axis), wanted)
        return wanted

    def config(self, **changes: Any) -> MoEConfig:
        """The least that any backend has to do, with the changes; sizes that the parts take."""
        asked = {**SIZES, "dtype": next(iter(self.dtypes), "float32"), **changes}
        asked |= {axis: self.fit(axis, asked[axis]) for axis in SIZES}
        return MoEConfig(**asked)

    def fitted(self, config: MoEConfig) -> MoEConfig:
        """The same with sizes of rows and experts that the parts take."""
        names = ("hidden_size", "intermediate_size")
        return replace(config, **{n: self.fit(n, getattr(config, n)) for n in names})

    def resolve(
        self, config: MoEConfig, parallel: ParallelConfig | None = None, **wants: Any
    ) -> Resolution:
        wants = {"device": self.device, "router": "none", "autograd": self.autograd} | wants
        return resolve(config, parallel, wants.pop("spec", self.spec), **wants)

    def mine(self, resolution: Resolution) -> list[Any]:
        """The refusals that come from the parts under test."""
        labels = [c.label for c in self.parts]
        return [r for r in resolution.refusals if any(label in r.part for label in labels)]

    def skip(self, resolution: Resolution) -> NoReturn:
        """Skips the test for a request that was refused, and says which kind of refusal it was."""
        mine = self.mine(resolution)
        absent = [r.fix for r in mine if r.code == "needs"]
        if absent or not mine:
            others = "; ".join(str(r) for r in resolution.refusals[:3])
            pytest.skip(NOT_HERE + ("; ".join(absent) or f"no partner serves: {others}"))
        asked = dict.fromkeys(r.axis if r.code == "rule" else f"{r.axis}={r.wanted}" for r in mine)
        pytest.skip(NOT_CLAIMED + ", ".join(asked))


@functools.lru_cache(maxsize=64)
def target(spec: str, device: str = "cpu") -> Target:
    return Target(spec, device)


class Conformance:
    """Base of all suites. ``backend`` is a spec, ``device`` a torch device, ``profile`` the heading
    under which the plugin counts the tests."""

    backend: ClassVar[str] = ""
    device: ClassVar[str] = "cpu"
    profile: ClassVar[str] = "core"

    @property
    def target(self) -> Target:
        return target(self.backend, self.device)

    @pytest.fixture(autouse=True)
    def _can_run_here(self) -> None:
        if not self.backend:
            return
        absent = [
            reason
            for role in self.target.roles
            if self.profile in ("core", role) and (reason := self.target.unavailable(role))
        ]
        if absent:
            pytest.skip(NOT_HERE + "; ".join(dict.fromkeys(absent)))

    def or_skip(self, build: Callable[[], Any]) -> Any:
        """What ``build`` gives; skips where the parts under test refuse what was asked."""
        try:
            return build()
        except ConfigError as error:
            if error.resolution is None:
                raise
            self.target.skip(error.resolution)


def _candidates(named: NamedBackend) -> list[Candidate]:
    entry = registry.get(named.name, named.distribution)
    mode = named.options.get("mode")
    return [
        Candidate(
            entry.backend,
            part,
            entry.distribution,
            entry.version,
            {k: v for k, v in named.options.items() if k in part.options},
        )
        for part in entry.backend.parts
        if mode is None or part.mode in ("", mode)
    ]


def _missing(candidate: Candidate, device: str) -> str:
    kind = torch.device(device).type
    if kind not in candidate.part.offer.device:
        return f"{candidate.label} runs on {', '.join(map(str, candidate.part.offer.device))}"
    if kind == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    return "; ".join(filter(None, map(requirement_fault, candidate.part.needs)))


def _nearest(offered: Any, wanted: int) -> int:
    if isinstance(offered, Range):
        step = offered.multiple_of
        value = -(-max(wanted, offered.min) // step) * step
        return value if offered.max is None or value <= offered.max else offered.max // step * step
    values = sorted(v for v in offered or (wanted,) if isinstance(v, int))
    return next((v for v in values if v >= wanted), values[-1])


assert set(PREFERRED) == set(DTYPES)
