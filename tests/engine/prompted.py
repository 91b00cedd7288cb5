"""The tiny trained target in transformers with a prompt of its own, for tests of the law of sampled texts."""

import torch
import trained

from dflash_plugins.statistics import needed_noncentrality


class PromptedTarget:
    """``logits`` after texts, and the ``greedy`` ids of ``length`` tokens after the ``prompt``."""

    def __init__(self, length):
        from transformers import AutoModelForCausalLM

        self.path = trained.pair("dflash")[0]
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()
        self.prompt = trained.prompts(1, seed=8, lengths=[12])[0]
        text = list(self.prompt)
        for _ in range(length):
            text.append(int(self.logits([text])[0].argmax()))
        self.greedy = text[len(self.prompt) :]

    @torch.no_grad()
    def logits(self, texts):
        return self.model(torch.tensor(texts)).logits[:, -1]


def smallest_effect(freedom, alpha):
    """Total variation that 2,000 samples show with chance 0.9, whatever its shape: n sum (p' - p)^2 / p >= 4 n TV^2."""
    return (needed_noncentrality(freedom, alpha, 0.9) / (4 * 2000)) ** 0.5
