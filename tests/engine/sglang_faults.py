"""A plugin for tests: plants one fault, ``SGLANG_FAULT=NAME``, below what the audit of SGLang watches.

``engine_drafts`` is no fault: SGLang's own worker drafts, as on a GPU, and the core only verifies.
"""

import os


def register():
    name = os.environ.get("SGLANG_FAULT")
    if not name:
        return
    from sglang_ext import runner

    prepare = runner.prepare

    def planted(worker, server_args):
        found = prepare(worker, server_args)
        return FAULTS[name]() or found

    runner.prepare = planted


def around(module, name, change):
    shipped = getattr(module, name)
    setattr(module, name, lambda *arguments, **options: change(shipped(*arguments, **options)))


def one_more_accepted():
    from sglang.srt.speculative import dflash_worker_v2 as worker

    limit = 7
    around(worker, "compute_dflash_correct_drafts_and_bonus", lambda r: ((r[0] + 1).clamp(max=limit), r[1]))


def another_bonus():
    from sglang.srt.speculative import dflash_worker_v2 as worker

    around(worker, "compute_dflash_correct_drafts_and_bonus", lambda r: (r[0], (r[1] + 1) % 200))


def shifted_context():
    from sglang.srt.speculative import dflash_worker_v2 as worker

    around(worker, "compute_position", lambda r: (r[0] + 1, *r[1:]))


def another_mask():
    from sglang_ext.audit import AuditedWorker

    shipped = AuditedWorker.__init__

    def init(self, *arguments, **options):
        shipped(self, *arguments, **options)
        self._mask_token_id -= 1

    AuditedWorker.__init__ = init


def q_of_other_tokens():
    from dataclasses import replace

    from sglang_ext import proposer

    around(proposer, "realised_q", lambda q: replace(q, ids=q.ids + 1))


def q_of_an_argmax():
    import torch

    from dflash_plugins.selector import Choice
    from sglang_ext.proposer import DFlashPluginsWorker

    def choose(scores, first):
        return Choice(scores.argmax(-1), torch.softmax(scores.float(), dim=-1))

    DFlashPluginsWorker._choose = lambda self, rows, sampling: choose


def no_rules():
    from dataclasses import replace

    from sglang_ext import acceptance

    shipped = acceptance.accept
    off = {"need_top_k_sampling": False, "need_top_p_sampling": False, "need_min_p_sampling": False}
    acceptance.accept = lambda candidates, proposals, logits, sampling: shipped(
        candidates, proposals, logits, replace(sampling, **off)
    )


def engine_drafts():
    from sglang.srt.models import dflash
    from sglang.srt.models.registry import ModelRegistry

    from sglang_ext.proposer import VerifyingWorker

    ModelRegistry.models |= {name: getattr(dflash, name) for name in ("DFlashDraftModel", "DFlash2DraftModel")}
    return VerifyingWorker


FAULTS = {
    f.__name__: f
    for f in (
        one_more_accepted,
        another_bonus,
        shifted_context,
        another_mask,
        q_of_other_tokens,
        q_of_an_argmax,
        no_rules,
        engine_drafts,
    )
}
