"""Stand-in for triton.knobs: there is nothing to turn and nothing to listen to."""

from types import SimpleNamespace

runtime = compilation = SimpleNamespace()
