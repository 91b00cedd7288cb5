"""What an engine drafted and emitted, held against the core's drafter, an oracle and the plain text; for any engine."""

import json

import oracle
import torch
from safetensors.torch import load_file

from dflash_plugins.identity import judge, numerical_bound

# fp32 sums in another order differ by about 1e-5 here.
CLOSE = 1e-4


def ties(plain_texts, texts):
    """How many texts leave the plain one at a tie; anything else that differs fails.

    A plain text is ``{ids, reason, best}``, ``best`` the highest logits of each place as [token, logit], best first.
    """
    found = 0
    for expected, got in zip(plain_texts, texts, strict=True):
        if got["ids"] == expected["ids"]:
            assert got["reason"] == expected["reason"]
            continue
        pairs = zip(expected["ids"], got["ids"], strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        assert place is not None, "one text ended before the other"
        logits, best = dict(map(tuple, expected["best"][place])), expected["best"][place][0][1]
        gap = best - logits.get(got["ids"][place], min(logits.values()))
        assert judge(gap, numerical_bound(best, "float32")) != "FAIL", (place, gap)
        found += 1
    return found


def by_transformers(target, requests):
    """{ids, reason, best} of [{prompt, max_new_tokens}] by ``generate`` of transformers, one at a time, EOS ignored."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    for one in requests:
        got = model.generate(
            torch.tensor([one["prompt"]]), max_new_tokens=one["max_new_tokens"], do_sample=False,
            return_dict_in_generate=True, output_logits=True, pad_token_id=0,
        )  # fmt: skip
        tops = [row[0].topk(5) for row in got.logits]
        best = [list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in tops]
        found.append({"ids": got.sequences[0, len(one["prompt"]) :].tolist(), "reason": "length", "best": best})
    return found


class Reference:
    """The core's drafter, and the oracle that shares no code with it, on features of the target in transformers."""

    def __init__(self, target, drafter):
        from transformers import AutoModelForCausalLM

        from dflash_plugins.drafter import load_drafter

        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.drafter = load_drafter(drafter).eval()
        embedding, head = self.target.model.embed_tokens.weight.detach(), self.target.lm_head.weight.detach()
        self.drafter.bind(embedding, head)
        weights = {name: value.float().numpy() for name, value in load_file(drafter / "model.safetensors").items()}
        config = self.drafter.config
        # The oracle knows one of the two places where a config may state it.
        raw = {"rope_theta": config.rope_theta} | json.loads((drafter / "config.json").read_text())
        self.oracle = oracle.OracleDrafter(
            raw, weights, embedding.numpy(), head.numpy(), list(config.causal), list(config.windows)
        )

    @torch.no_grad()
    def features(self, texts):
        """{text: features [len(text), taps * Ht]}; no tap is the last layer, whose state transformers norms."""
        found, taps = {}, self.drafter.config.target_layer_ids
        for text in texts:
            states = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
            found[text] = torch.cat([states[tap + 1] for tap in taps], dim=-1)[0]
        return found

    @torch.no_grad()
    def drafts(self, features, rounds, k, window=None):
        """Drafted ids of each (text, place), with the smallest lead of a slot's best score over its second.

        With ``window`` the drafter knows only that many tokens before the anchor.
        """
        from dflash_plugins.methods import method_of
        from dflash_plugins.methods.base import ReferenceBackbone, draft_in_passes
        from dflash_plugins.pair import served_prefix_lengths
        from dflash_plugins.selector import Choice

        def keep_scores(scores, _first):
            return Choice(scores.argmax(-1), scores)

        places = torch.tensor([place for _, place in rounds])
        anchors = torch.tensor([text[place] for text, place in rounds])
        starts = torch.zeros_like(places) if window is None else (places - window).clamp(min=0)
        known = [features[t][start:p] for (t, p), start in zip(rounds, starts.tolist(), strict=True)]
        padded = torch.nn.utils.rnn.pad_sequence(known, batch_first=True)
        columns = starts[:, None] + torch.arange(padded.shape[1])
        context = self.drafter.context_kv(padded, columns, places - starts)
        ids = method_of(self.drafter.config).draft(self.drafter, anchors, places, context, k).ids
        loop = self.drafter.config.loop
        prefixes = served_prefix_lengths(loop, k)[0] if loop else ()
        backbone = ReferenceBackbone(self.drafter, anchors, places, context, k)
        best = draft_in_passes(backbone, anchors, k, keep_scores, prefixes).rows.topk(2, dim=-1).values
        return ids.tolist(), (best[..., 0] - best[..., 1]).amin(dim=-1).tolist()


def own_rounds(requests, texts, rounds):
    """{(text, place): draft} of the rounds whose anchor is a token of one of the texts, each once."""
    known = {tuple(r["prompt"]): tuple(r["prompt"] + t["ids"]) for r, t in zip(requests, texts, strict=True)}
    found = {}
    for one in rounds:
        text, place = known.get(tuple(one["prompt"]), ()), one["place"]
        if len(one["prompt"]) <= place < len(text) and text[place] == one["anchor"]:
            assert found.setdefault((text, place), one["draft"]) == one["draft"], "drafted twice, and differently"
    return found


def compared(reference, found, k, window=None):
    """[(draft, the core's)] of all rounds but those with two scores so close that rounding may decide."""
    features = reference.features({text for text, _ in found})
    ids, leads = reference.drafts(features, list(found), k, window)
    kept = [(draft, e) for draft, e, lead in zip(found.values(), ids, leads, strict=True) if lead > CLOSE]
    assert len(kept) > 0.95 * len(found)
    return kept


def check_against_the_core(reference, found, k, window=None):
    """How many drafts were compared, all of them equal."""
    kept = compared(reference, found, k, window)
    assert [one for one in kept if one[0] != one[1]] == []
    return len(kept)


def check_against_the_oracle(reference, found, k, prefixes, most=110):
    """How many drafts were compared with plain loops in float64, pass by pass, all of them equal; shortest first."""
    found = dict(sorted(found.items(), key=lambda one: one[0][1])[:most])
    features = reference.features({text for text, _ in found})
    _, leads = reference.drafts(features, list(found), k)
    compared = 0
    for ((text, place), draft), lead in zip(found.items(), leads, strict=True):
        if lead > CLOSE:
            context = features[text][:place].numpy()
            assert draft == reference.oracle.draft(text[place], place, context, k, prefixes).ids
            compared += 1
    return compared
