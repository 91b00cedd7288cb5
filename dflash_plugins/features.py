"""Reading a target's features: the residual streams after chosen decoder layers (methods.md section 2).

The stream is taken at the layer itself, before the model's final norm; transformers' ``hidden_states`` hold the NORMED
state for the last layer, so hooks are the only way to read all layers alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dflash_plugins.errors import BadInput


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers of a transformers causal LM, whatever it is called there.

    It is the one outermost ``ModuleList`` of the decoder with as many entries as the text config has hidden layers.
    BadInput when there is none or more than one.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else model
    found = [m for m in _outermost_lists(decoder) if count is None or len(m) == count]
    if len(found) != 1:
        raise BadInput(f"{type(model).__name__} has {len(found)} lists of {count or 'any number of'} layers, need one")
    return found[0]


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


class FeatureTap:
    """Collects the features of one target forward at a time.

    >>> with FeatureTap(model, config.target_layer_ids) as tap:   # doctest: +SKIP
    ...     model(input_ids)
    ...     features = tap.take()                                 # [R, T, taps * Ht], the target's dtype

    Order follows ``target_layer_ids``. Leaving the context removes the hooks. Raises BadInput for ids the target lacks.
    """

    def __init__(
        self, model: nn.Module, target_layer_ids: Sequence[int], *, layers: Sequence[nn.Module] | None = None
    ) -> None:
        self._layers = list(decoder_layers(model) if layers is None else layers)
        self._ids = tuple(target_layer_ids)
        self._streams: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        outside = [i for i in self._ids if not 0 <= i < len(self._layers)]
        if outside or not self._ids:
            raise BadInput(f"target_layer_ids {list(self._ids)}: the target has layers 0..{len(self._layers) - 1}")

    def __enter__(self) -> FeatureTap:
        """Put one hook on each distinct layer; BadInput when they are already there."""
        if self._handles:
            raise BadInput("this tap is already open")
        for index in sorted(set(self._ids)):
            self._handles.append(self._layers[index].register_forward_hook(self._reader(index)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hooks and forget what was read."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._streams.clear()

    def take(self) -> Tensor:
        """Features [..., taps * Ht] of the last forward, once; BadInput when no forward ran since."""
        missing = [i for i in self._ids if i not in self._streams]
        if missing:
            raise BadInput(f"layers {missing} have not run since the last read")
        features = torch.cat([self._streams[i] for i in self._ids], dim=-1)
        self._streams.clear()
        return features

    def _reader(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def read(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # Decoder layers return the stream, or a tuple that begins with it.
            self._streams[index] = output[0] if isinstance(output, tuple) else output

        return read
