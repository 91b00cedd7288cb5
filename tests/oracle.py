"""Plain-loop oracle of one drafted block, in float64. Imports nothing from the package and shares no code with it.

It does one request at a time, with lists of positions instead of masks, so each rule can be read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


def sees(query: int, key: int, causal: bool, window: int | None) -> bool:
    """May the row at position ``query`` look at the row at position ``key``?"""
    if causal and key > query:
        return False
    if window is None:
        return True
    if query - key >= window:
        return False
    return causal or key - query < window


def training_row(anchors: list[int], num_context: int, block: int, query: int) -> list[bool]:
    """What flattened training row ``query`` may see: num_context columns, then len(anchors) * block rows."""
    mine = query // block
    row = [column < anchors[mine] for column in range(num_context)]
    for other in range(len(anchors) * block):
        row.append(other // block == mine)
    return row


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


def invert(probs: list[float], uniform: float) -> int:
    """The first index whose running sum exceeds the uniform."""
    total = 0.0
    for index, prob in enumerate(probs):
        total += prob
        if uniform < total:
            return index
    return len(probs) - 1


def rms(vector: Array, weight: Array, eps: float) -> Array:
    mean = sum(float(x) ** 2 for x in vector) / len(vector)
    return vector / math.sqrt(mean + eps) * weight


def rope(vector: Array, position: int, theta: float) -> Array:
    """Channel c and channel c + half turn together by position / theta^(2c / dim)."""
    half = len(vector) // 2
    out = np.empty_like(vector)
    for c in range(half):
        angle = position / theta ** (2 * c / len(vector))
        a, b = vector[c], vector[c + half]
        out[c] = a * math.cos(angle) - b * math.sin(angle)
        out[c + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def convolve(rows: list[Array], base: Array, delta: list[Array], group_size: int) -> list[Array]:
    """y_i[c] = sum over o of (base[o][c] + delta_i[o][c // group_size]) * x_{i-o}[c]; rows before slot 0 are zero."""
    out = []
    for i in range(len(rows)):
        y = np.zeros_like(rows[i])
        for tap in range(base.shape[0]):
            if i - tap < 0:
                continue
            for c in range(len(y)):
                y[c] += (base[tap][c] + delta[i][tap][c // group_size]) * rows[i - tap][c]
        out.append(y)
    return out


@dataclass
class Drafted:
    ids: list[int]
    q: list[dict[int, float]] = field(default_factory=list)


@dataclass
class OracleDrafter:
    """``weights`` under the released names; ``raw`` the config.json; shared tensors as numpy arrays."""

    raw: dict
    weights: dict[str, Array]
    embedding: Array
    head: Array
    causal: list[bool]
    windows: list[int | None]

    def __post_init__(self) -> None:
        self.weights = {name: np.asarray(value, dtype=np.float64) for name, value in self.weights.items()}
        self.embedding, self.head = np.float64(self.embedding), np.float64(self.head)
        self.nested = self.raw["dflash_config"]
        self.eps, self.theta, self.dim = self.raw["rms_norm_eps"], self.raw["rope_theta"], self.raw["head_dim"]

    def linear(self, name: str, x: Array) -> Array:
        bias = self.weights.get(f"{name}.bias")
        out = self.weights[f"{name}.weight"] @ x
        return out if bias is None else out + bias

    def heads(self, vector: Array) -> list[Array]:
        return [vector[i : i + self.dim] for i in range(0, len(vector), self.dim)]

    def key_value(self, layer: int, x: Array, position: int) -> tuple[list[Array], list[Array]]:
        name = f"layers.{layer}.self_attn"
        norm = self.weights[f"{name}.k_norm.weight"]
        keys = [
            rope(rms(h, norm, self.eps), position, self.theta) for h in self.heads(self.linear(f"{name}.k_proj", x))
        ]
        return keys, self.heads(self.linear(f"{name}.v_proj", x))

    def attention(self, layer: int, rows: list[Array], positions: list[int], context: list[Array]) -> list[Array]:
        """``context`` [n]: one state per position 0..n-1, all of it strictly before the anchor."""
        name = f"layers.{layer}.self_attn"
        pairs = [(p, *self.key_value(layer, x, p)) for p, x in enumerate(context)]
        pairs += [(p, *self.key_value(layer, x, p)) for p, x in zip(positions, rows, strict=True)]
        out = []
        for position, row in zip(positions, rows, strict=True):
            queries = self.heads(self.linear(f"{name}.q_proj", row))
            seen = [(k, v) for p, k, v in pairs if sees(position, p, self.causal[layer], self.windows[layer])]
            mixed = []
            for head, query in enumerate(queries):
                query = rope(rms(query, self.weights[f"{name}.q_norm.weight"], self.eps), position, self.theta)
                kv = head // (len(queries) // len(seen[0][0]))
                probs = softmax([float(query @ k[kv]) / math.sqrt(self.dim) for k, _ in seen])
                mixed.append(sum(p * v[kv] for p, (_, v) in zip(probs, seen, strict=True)))
            out.append(self.linear(f"{name}.o_proj", np.concatenate(mixed)))
        return out

    def mlp(self, layer: int, x: Array) -> Array:
        name = f"layers.{layer}.mlp"
        gate = self.linear(f"{name}.gate_proj", x)
        return self.linear(f"{name}.down_proj", gate / (1 + np.exp(-gate)) * self.linear(f"{name}.up_proj", x))

    def wrapped(self, layer: int, side: str, normed: list[Array], inner) -> list[Array]:
        """The sublayer ``inner`` with the convolutions of DFlash 2 on both ends, where the drafter has them."""
        if "conv_kernel_size" not in self.nested:
            return inner(normed)
        base = self.weights[f"layers.{layer}.{side}.base_kernel"]
        group = self.nested["conv_group_size"]
        shape = (2, base.shape[1], base.shape[2] // group)
        deltas = [self.linear(f"layers.{layer}.{side}.kernel_projection", x).reshape(shape) for x in normed]
        before = convolve(normed, base[0], [d[0] for d in deltas], group)
        return convolve(inner(before), base[1], [d[1] for d in deltas], group)

    def hidden(self, ids: list[int], anchor_position: int, features: Array) -> list[Array]:
        """Final-norm rows of one block; only ``features`` before the anchor are looked at."""
        norm = self.weights["hidden_norm.weight"]
        context = [rms(self.linear("fc", np.float64(f)), norm, self.eps) for f in features[:anchor_position]]
        positions = [anchor_position + i for i in range(len(ids))]
        rows = [self.embedding[i] * self.nested.get("input_embedding_scale", 1.0) for i in ids]
        for layer in range(self.raw["num_hidden_layers"]):
            one = self.weights[f"layers.{layer}.input_layernorm.weight"]
            two = self.weights[f"layers.{layer}.post_attention_layernorm.weight"]
            normed = [rms(x, one, self.eps) for x in rows]
            added = self.wrapped(
                layer, "attention_conv", normed, lambda xs, n=layer: self.attention(n, xs, positions, context)
            )
            rows = [x + a for x, a in zip(rows, added, strict=True)]
            normed = [rms(x, two, self.eps) for x in rows]
            added = self.wrapped(layer, "mlp_conv", normed, lambda xs, n=layer: [self.mlp(n, x) for x in xs])
            rows = [x + a for x, a in zip(rows, added, strict=True)]
        return [rms(x, self.weights["norm.weight"], self.eps) for x in rows]

    def logits(self, hidden: Array) -> Array:
        head = self.weights.get("lm_head.weight", self.head)
        out = head @ hidden * self.nested.get("output_multiplier", 1.0)
        cap = self.nested.get("final_logit_softcapping")
        return out if cap is None else cap * np.tanh(out / cap)

    def target_id(self, draft_id: int) -> int:
        return draft_id + int(self.weights["d2t"][draft_id]) if "d2t" in self.weights else draft_id

    def draft(
        self,
        anchor: int,
        anchor_position: int,
        features: Array,
        k: int,
        prefixes: tuple[int, ...] = (),
        temperature: float = 0.0,
        uniforms: list[float] | None = None,
    ) -> Drafted:
        """All passes of a round: each runs k mask rows less what is known, and selects up to its own bound."""
        chosen = Drafted([])
        for bound in (*prefixes, k):
            mask = self.nested["mask_token_id"]
            ids = [anchor, *chosen.ids] + [mask] * (k - len(chosen.ids))
            hidden = self.hidden(ids, anchor_position, features)
            while len(chosen.ids) < bound:
                slot = len(chosen.ids)
                previous = chosen.ids[-1] if chosen.ids else anchor
                names, scores = self.slot_scores(hidden[slot + 1], previous)
                probs = softmax([s / temperature for s in scores]) if temperature else None
                index = invert(probs, uniforms[slot]) if probs else int(np.argmax(scores))
                chosen.ids.append(names[index])
                chosen.q.append(dict(zip(names, probs, strict=True)) if probs else {names[index]: 1.0})
        return chosen

    def slot_scores(self, hidden: Array, previous: int) -> tuple[list[int], list[float]]:
        """Tokens that a slot may take and their scores after ``previous``."""
        logits = self.logits(hidden)
        if "selector_top_k" not in self.nested:
            return [self.target_id(i) for i in range(len(logits))], [float(x) for x in logits]
        order = sorted(range(len(logits)), key=lambda i: -logits[i])[: self.nested["selector_top_k"]]
        names = [self.target_id(i) for i in order]
        turned = self.weights["candidate_selector.hidden_projection.weight"] @ hidden
        left = self.weights["candidate_selector.predecessor_codebook"][previous]
        right = self.weights["candidate_selector.successor_codebook"]
        pair = [sum(left[r] * turned[r] * right[name][r] for r in range(len(turned))) for name in names]
        return names, [float(logits[i]) + p for i, p in zip(order, pair, strict=True)]
