"""The cells of the matrix, as ``plan.toml`` lists them, and what each of them asks of ``prove``."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash_plugins.errors import BadInput
from dflash_plugins.matrix.rows import Decoding, Evidence

PROOF_ONLY = "--proof-only"
"""Asks a cell's process to leave ``bench`` out."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class How(_Record):
    """Arguments of ``prove.run``; None: its own default. ``extra`` goes by the engine's names."""

    prompts: str | None = None
    max_tokens: int | None = Field(default=None, gt=0)
    concurrency: int | None = Field(default=None, gt=0)
    temperature: float | None = Field(default=None, gt=0)
    samples: int | None = Field(default=None, gt=0)
    extra: Mapping[str, Any] = {}

    def arguments(self) -> dict[str, Any]:
        """Those that are given, as ``prove.run`` takes them."""
        return self.model_dump(exclude_none=True)

    def options(self) -> list[str]:
        """The same for the command line."""
        given = self.model_dump(exclude_none=True, exclude={"extra"})
        plain = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return plain + [word for key, value in self.extra.items() for word in ("--set", f"{key}={value}")]


class Speed(_Record):
    """Arguments of ``bench.run``, which measures a greedy cell after its proof."""

    k: int = Field(gt=0)
    concurrency: tuple[int, ...] = Field(min_length=1)
    max_tokens: int = Field(gt=0)
    runs: int = Field(gt=0)
    dtype: str


class Pair(_Record):
    """What is run: names for ``prove``, or None where a script brings it, and how for each decoding."""

    target: str | None = None
    draft: str | None = None
    speed: Speed | None = None
    greedy: How
    sampled: How

    @model_validator(mode="after")
    def _only_sampled_draws(self) -> Self:
        if self.greedy.temperature is not None or self.sampled.temperature is None:
            raise ValueError("sampled has a temperature, greedy has none")
        return self


class Place(_Record):
    """Where cells run: the file of pins, the engine as it has to be there, and what brings its runner to this machine.

    ``script`` is a path in the checkout; None: the package itself runs the cell. ``speed``: whether one measured there
    says anything.
    """

    environment: str
    engine: Literal["vllm", "sglang"]
    version: str
    runner: Literal["v1", "v2"] | None = None
    evidence: Evidence
    pair: str
    script: str | None = None
    speed: bool = True


class Cell(_Record):
    """One row to be: a pair at a place. ``minutes``: what it usually takes."""

    id: str
    place: Place
    method: Literal["dflash", "dflash2", "dloop"]
    decoding: Decoding
    minutes: float = Field(gt=0)
    pair: Pair

    @property
    def how(self) -> How:
        """The arguments of its proof."""
        return self.pair.greedy if self.decoding == "greedy" else self.pair.sampled

    @property
    def speed(self) -> Speed | None:
        """What ``bench`` is asked for, if anything."""
        return self.pair.speed if self.decoding == "greedy" and self.place.speed else None

    def without_speed(self) -> Cell:
        """The same cell, proven only."""
        return self.model_copy(update={"pair": self.pair.model_copy(update={"speed": None})})

    def model(self, kind: Literal["target", "draft"]) -> str:
        """The name of its target or drafter; ``BadInput`` where a script has to bring it."""
        name = self.pair.target if kind == "target" else self.pair.draft
        if name is None:
            raise BadInput(f"cell {self.id}: its pair is brought by {self.place.script}")
        return name.format(method=self.method)

    def program(self) -> list[str]:
        """What runs the cell inside its environment, from the root of a checkout."""
        inside = ["-m", "dflash_plugins.matrix.cell"] if self.place.script is None else [self.place.script]
        skipped = [PROOF_ONLY] if self.pair.speed is None else []
        return ["python", *inside, self.id, *skipped]

    def command(self) -> str:
        """What a user types in a checkout to repeat its proof: ``prove`` itself where that reaches the runner."""
        argv = ["ci/in-env", self.place.environment, "--"]
        if self.place.script is not None:
            return shlex.join([*argv, *self.program()])
        pair = ["--target", self.model("target"), "--draft", self.model("draft")]
        return shlex.join(
            [*argv, "dflash-plugins", "prove", "--engine", self.place.engine, *pair, *self.how.options(), "--json"]
        )


def parse_plan(text: str) -> tuple[Cell, ...]:
    """The cells of a plan; ``BadInput`` with every fault."""
    document = tomllib.loads(text)
    places, pairs = document.get("places", {}), document.get("pairs", {})
    cells, faults = [], []
    for entry in document["cells"]:
        try:
            place = places[entry["place"]]
            cells.append(Cell.model_validate(entry | {"place": place, "pair": pairs[place["pair"]]}))
        except KeyError as error:
            faults.append(f"{entry.get('id')}: there is no {error}")
        except ValidationError as error:
            faults += [f"{entry.get('id')}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    ids = [cell.id for cell in cells]
    faults += [f"{name}: twice" for name in sorted({i for i in ids if ids.count(i) > 1})]
    if faults:
        raise BadInput("the plan of the matrix cannot be used: " + "; ".join(faults))
    return tuple(cells)


@cache
def planned() -> tuple[Cell, ...]:
    """The cells of ``plan.toml``, in the order in which they are run and shown."""
    return parse_plan(files("dflash_plugins.matrix").joinpath("plan.toml").read_text(encoding="utf-8"))


def find_cell(identity: str) -> Cell:
    """The cell of that id; ``BadInput`` listing all of them."""
    for cell in planned():
        if cell.id == identity:
            return cell
    raise BadInput(f"no cell {identity!r} in the plan of the matrix; there are {', '.join(c.id for c in planned())}")
