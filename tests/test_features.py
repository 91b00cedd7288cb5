from types import SimpleNamespace

import pytest
import tiny
import torch
from torch import nn

from dflash_plugins.errors import BadInput
from dflash_plugins.features import FeatureTap, decoder_layers


class AddingLayer(nn.Module):
    def __init__(self, amount, as_tuple):
        super().__init__()
        self.amount, self.as_tuple = amount, as_tuple

    def forward(self, x):
        x = x + self.amount
        return (x, None) if self.as_tuple else x


class ToyTarget(nn.Module):
    """Layer i adds 10**i to a zero vector; the final norm wrecks the stream (F02)."""

    def __init__(self, as_tuple):
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=3)
        self.blocks = nn.ModuleList(AddingLayer(10**i, as_tuple) for i in range(3))

    def forward(self, x):
        for layer in self.blocks:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x * -1000.0


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize(("taps", "expected"), [([0, 2], [1.0, 111.0]), ([2, 0], [111.0, 1.0]), ([1, 1], [11.0, 11.0])])
def test_taps_read_layer_outputs_in_order(as_tuple, taps, expected):
    model = ToyTarget(as_tuple)
    with FeatureTap(model, taps) as tap:
        model(torch.zeros(1, 1, 1))
        assert tap.take().flatten().tolist() == expected


def test_hooks_leave_with_the_context_even_after_an_error():
    model = ToyTarget(False)
    with pytest.raises(ZeroDivisionError), FeatureTap(model, [0, 1]):
        raise ZeroDivisionError
    assert all(not layer._forward_hooks for layer in model.blocks)


def test_a_stale_feature_is_never_given_twice():
    model = ToyTarget(False)
    with FeatureTap(model, [0]) as tap:
        with pytest.raises(BadInput, match=r"\[0\]"):
            tap.take()
        model(torch.zeros(1, 1))
        tap.take()
        with pytest.raises(BadInput, match="have not run"):
            tap.take()


@pytest.mark.parametrize("taps", [[3], [-1], []])
def test_layers_the_target_lacks_are_refused(taps):
    with pytest.raises(BadInput, match=r"layers 0\.\.2"):
        FeatureTap(ToyTarget(False), taps)


def test_two_lists_of_layers_are_not_guessed_between():
    model = ToyTarget(False)
    model.others = nn.ModuleList(AddingLayer(1, False) for _ in range(3))
    with pytest.raises(BadInput, match="2 lists of 3 layers"):
        decoder_layers(model)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_features_of_a_transformers_target(kind):
    if kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=512)).eval()
        norm = model.transformer.ln_f
    else:
        model = tiny.target(kind)
        norm = model.model.norm
    ids = torch.arange(6)[None]
    with torch.no_grad(), FeatureTap(model, [0, 3]) as tap:
        states = model(ids, output_hidden_states=True).hidden_states
        first, last = tap.take().chunk(2, dim=-1)
    assert torch.equal(first, states[1])
    assert not torch.allclose(last, states[4], atol=1e-3)  # transformers gives the normed state here
    assert torch.allclose(norm(last), states[4], atol=1e-6)
