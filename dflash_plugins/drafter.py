"""The reference drafter: a small block-diffusion model that reads the target's features (methods.md sections 2 to 4).

One class serves DFlash, DFlash 2 and D-Loop backbones. Serving runs one block per row, each with its own context;
training runs many blocks of one sequence over the same context with an explicit mask. Both go through ``hidden``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody reads

from dflash_plugins.check import inspect_pair
from dflash_plugins.checkpoint import account, directory_of, load_tensors, new_checkpoint, read_header, write_checkpoint
from dflash_plugins.config import DraftConfig, to_nested
from dflash_plugins.context import ContextKV
from dflash_plugins.drafter_layers import DecoderLayer, Mask, RMSNorm, Rotary, initialise, require_computable
from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Severity
from dflash_plugins.layout import layer_visibility, real_columns, serving_mask
from dflash_plugins.selector import CandidateSelector


class MasksByLayer(Protocol):
    """What block rows may see, asked for by the kind of layer; ``train.flex.FlexMasks`` is one."""

    def attend(self, causal: bool, window: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Attention of a layer: (query [R, heads, Q, D], key, value [R, kv_heads, C + Q, D]) -> as query."""


class Drafter(nn.Module):
    """A drafter of any method, with the parameter names of the released checkpoints.

    Shapes: R requests, B rows of a block, C context columns, H hidden size, Ht hidden size of the target, V vocabulary
    of the target. It owns an embedding only when asked; a head and the id map ``d2t`` when asked or when the head is
    reduced. Otherwise ``bind`` lends it the target's, which are neither trained nor saved. Raises Refused for a
    description that cannot be computed.
    """

    def __init__(
        self, config: DraftConfig, *, own_embedding: bool = False, own_head: bool = False, own_map: bool = False
    ) -> None:
        super().__init__()
        require_computable(config)
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps=config.rms_norm_eps)
        selector = config.selector
        self.candidate_selector = CandidateSelector(hidden, config.vocab_size, selector) if selector else None
        rows = config.draft_vocab_size or config.vocab_size
        reduced = rows != config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if own_embedding else None
        self.lm_head = nn.Linear(hidden, rows, bias=False) if own_head or reduced else None
        self.d2t: Tensor | None
        self.shared_embedding: Tensor | None
        self.shared_head: Tensor | None
        self.register_buffer("d2t", torch.zeros(rows, dtype=torch.int64) if own_map or reduced else None)
        self.register_buffer("shared_embedding", None, persistent=False)
        self.register_buffer("shared_head", None, persistent=False)
        self._rotary = Rotary(config)
        self.apply(initialise)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.fc.weight.dtype

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        return (cast(DecoderLayer, layer) for layer in self.layers)

    def bind(self, embedding: Tensor, lm_head: Tensor) -> None:
        """Lend the target's ``embedding`` [V, H] and ``lm_head`` [V, H], frozen; own tensors of the checkpoint win.

        Raises BadInput when a tensor that is needed does not fit.
        """
        if self.embed_tokens is None:
            self.shared_embedding = self._lent("embedding", embedding)
        if self.lm_head is None:
            self.shared_head = self._lent("lm_head", lm_head)

    def _lent(self, name: str, tensor: Tensor) -> Tensor:
        hidden, mask = self.config.hidden_size, self.config.mask_token_id
        if tensor.dim() != 2 or tensor.shape[1] != hidden:
            raise BadInput(f"the target's {name} is {list(tensor.shape)}, the drafter needs [V, {hidden}]")
        if name == "embedding" and mask >= tensor.shape[0]:
            raise BadInput(f"mask_token_id {mask} is outside the target's embedding of {tensor.shape[0]} rows")
        return tensor.detach().to(device=self.fc.weight.device, dtype=self.dtype)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Scaled input embeddings [..., H] of int ``input_ids`` [...]; BadInput when nothing is bound or owned."""
        table = self.shared_embedding if self.embed_tokens is None else self.embed_tokens.weight
        if table is None:
            raise BadInput("the drafter has no embedding of its own: bind the target's first")
        return F.embedding(input_ids, table) * self.config.input_embedding_scale

    def context_kv(self, features: Tensor, positions: Tensor, lengths: Tensor | None = None) -> ContextKV:
        """Context K/V from ``features`` [R, C, taps * Ht] at int ``positions`` [R, C].

        ``lengths`` int [R] says how many columns are real; all of them when it is None.
        """
        if lengths is None:
            lengths = torch.full((features.shape[0],), features.shape[1], device=features.device)
        states = self.hidden_norm(self.fc(features.to(self.dtype)))
        angles = self._rotary(positions)
        pairs = [layer.self_attn.key_value(states, angles) for layer in self._decoder_layers()]
        return ContextKV(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), positions.long(), lengths.long())

    def empty_context(self, rows: int) -> ContextKV:
        """A context of no columns for ``rows`` requests, on the drafter's device."""
        width = self.fc.in_features
        device = self.fc.weight.device
        features = torch.zeros(rows, 0, width, dtype=self.dtype, device=device)
        return self.context_kv(features, torch.zeros(rows, 0, dtype=torch.int64, device=device))

    def hidden(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        context: ContextKV,
        *,
        embeds: Tensor | None = None,
        mask: Tensor | MasksByLayer | None = None,
        block: int | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [R, Q, H], of ``input_ids`` [R, Q] (or ``embeds`` [R, Q, H]).

        Without ``mask`` every row is one block (Q = B) whose first position is the anchor's, and sees its real context
        strictly before the anchor. With bool ``mask`` [R or 1, Q, C + Q], True where a query may look, Q may hold many
        blocks of ``block`` rows each (``layout.training_mask``). Windows and causality of the layers, and the lengths
        of the context, apply on top of either. Context rows of one sequence may be shared by R = 1. ``MasksByLayer``
        know all of that by themselves.
        """
        x = self.embed(_given(input_ids)) if embeds is None else embeds
        real = real_columns(context.lengths, context.num_columns)
        if mask is None or isinstance(mask, Tensor):
            allowed = serving_mask(positions, context.positions, context.lengths) if mask is None else mask
            allowed = allowed & F.pad(real, (0, positions.shape[1]), value=True)[:, None, :]
            masks = self._layer_masks(allowed, positions, context.positions)
        else:
            masks = [mask.attend(*rule) for rule in self._layer_rules()]
        angles = self._rotary(positions)
        for index, layer in enumerate(self._decoder_layers()):
            pair = (_without_padding(context.keys[index], real), _without_padding(context.values[index], real))
            x = layer(x, angles, pair, masks[index], block or positions.shape[1])
        normed: Tensor = self.norm(x)
        return normed

    def _layer_rules(self) -> list[tuple[bool, int | None]]:
        return list(zip(self.config.causal, self.config.windows, strict=True))

    def _layer_masks(self, allowed: Tensor, positions: Tensor, context_positions: Tensor) -> list[Mask]:
        key_positions = torch.cat([context_positions, positions], dim=1)
        rules = self._layer_rules()
        by_rule: dict[tuple[bool, int | None], Tensor] = {(False, None): allowed}
        for causal, window in set(rules) - set(by_rule):
            seen = layer_visibility(positions, key_positions, causal=causal, window=window)
            by_rule[causal, window] = allowed & seen
        return [by_rule[rule] for rule in rules]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V_draft] of ``hidden`` [..., H]: own or lent head, then multiplier, then softcap."""
        head = self.shared_head if self.lm_head is None else self.lm_head.weight
        if head is None:
            raise BadInput("the drafter has no head of its own: bind the target's first")
        return scale_and_cap(F.linear(hidden, head), self.config)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for ids of the head's rows: the same, or draft id + d2t[draft id]."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def scale_and_cap(logits: Tensor, config: DraftConfig) -> Tensor:
    """``logits`` of a head, any shape, times ``output_multiplier`` and then through ``final_logit_softcapping``."""
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _given(input_ids: Tensor | None) -> Tensor:
    if input_ids is None:
        raise BadInput("give input_ids or embeds")
    return input_ids


def _without_padding(columns: Tensor, real: Tensor) -> Tensor:
    """Zero the padding, which may hold anything: a masked NaN would still reach the sum as 0 * NaN."""
    return torch.where(real[:, :, None, None], columns, torch.zeros_like(columns))


def load_drafter(path: Path | str, *, dtype: torch.dtype | None = None) -> Drafter:
    """The drafter of a checkpoint directory in any published layout, on the CPU, in eval mode.

    ``dtype`` None keeps the dtype the weights are stored in. Every stored tensor is claimed and every parameter
    written; otherwise Refused with all reasons. BadInput for files that cannot be read. Warnings are given once.
    """
    report = inspect_pair(path)
    config = report.require()
    for finding in report.findings:
        if finding.severity is Severity.WARNING:
            warnings.warn(str(finding), stacklevel=2)
    directory = directory_of(path)
    accounting = account(config, read_header(directory), subject=report.subject)
    tensors = load_tensors(directory, accounting)
    tensors.pop("t2d", None)
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].long()
    with torch.device("meta"):
        drafter = Drafter(
            config,
            own_embedding=accounting.own_embedding,
            own_head=accounting.own_head,
            own_map="d2t" in tensors,
        )
    # Strict: a parameter without a tensor or a tensor without a parameter is an error even if the accounting erred.
    drafter.load_state_dict(tensors, strict=True, assign=True)
    return drafter.to(dtype or getattr(torch, str(accounting.dtype))).eval()


def save_drafter(
    drafter: Drafter, path: Path | str, *, dtype: torch.dtype = torch.bfloat16, overwrite: bool = False
) -> Path:
    """Write config.json and model.safetensors in the released layout that the engines load. Returns ``path``.

    Lent tensors are not written. The directory appears whole or not at all; one that exists already is replaced with
    ``overwrite`` and is BadInput without.
    """
    path = Path(path)
    config = drafter.config.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in drafter.state_dict().items()
    }
    with new_checkpoint(path, overwrite=overwrite) as new:
        write_checkpoint(new, to_nested(config), tensors)
    return path
