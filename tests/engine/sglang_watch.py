"""A plugin for tests: writes down what our worker drafts and what is accepted, or hands on other drafts.

SGLang drafts in a process of its own, which loads plugins; the test's site lists this one. ``SGLANG_WATCH=FILE`` takes
one JSON line per request and round: ``{"request", "prompt", "place", "anchor", "draft", "accepted", "passes",
"free"}``, where ``place`` is the anchor's position, ``passes`` are the block ids of every pass and ``free`` counts what
nobody needs: slots of tokens, those that only the prefix cache holds among them, and rows of requests.
``SGLANG_WATCH_DRAFTS=MODE`` replaces the drafts: ``wrong`` (never what was drafted), ``random``, or ``right`` from the
texts in ``SGLANG_WATCH_TRUTH=FILE`` (JSON list of whole texts, prompt and continuation).
"""

import json
import os
import random
from pathlib import Path


def write_distribution(site):
    """Metadata under ``site`` that lets SGLang's processes load this file and ``sglang_faults``, if in PYTHONPATH."""
    info = site / "sglang_watch-0.0.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: sglang-watch\nVersion: 0.0.0\n")
    entries = "[sglang.srt.plugins]\nwatch = sglang_watch:register\nfaults = sglang_faults:register\n"
    info.joinpath("entry_points.txt").write_text(entries)


def register():
    if "SGLANG_WATCH" not in os.environ:
        return
    from sglang_ext import runner

    prepare = runner.prepare

    def watched(worker, server_args):
        found = prepare(worker, server_args)
        return found if found is worker else watching(found)

    runner.prepare = watched


def watching(worker):
    import torch

    rank = torch.distributed.get_rank()
    name = os.environ["SGLANG_WATCH"] + (f".rank{rank}" if rank else "")
    file = Path(name).open("a")  # noqa: SIM115 - for as long as the process lives
    mode = os.environ.get("SGLANG_WATCH_DRAFTS", "own")
    truth = (
        [tuple(t) for t in json.loads(Path(os.environ["SGLANG_WATCH_TRUTH"]).read_text())] if mode == "right" else []
    )
    draw = random.Random(7)

    class Watching(worker):
        _notes = ()

        def forward_batch_generation(self, batch, *arguments, **options):
            self._batch, self._notes = batch, ()
            result = super().forward_batch_generation(batch, *arguments, **options)
            for note, accepted in zip(self._notes, result.accept_lens.tolist() if self._notes else (), strict=True):
                file.write(json.dumps(note | {"accepted": accepted - 1}) + "\n")
            file.flush()
            return result

        def _forward_and_remember(self, forward_batch, *arguments, **options):
            self._passes = [forward_batch.input_ids.tolist()]
            return super()._forward_and_remember(forward_batch, *arguments, **options)

        def run_pass_again(self, block_ids):
            self._passes.append(block_ids.flatten().tolist())
            return super().run_pass_again(block_ids)

        def _propose_selector_block(self, *, anchor_token_ids, **more):
            real = super()._propose_selector_block(anchor_token_ids=anchor_token_ids, **more)
            width, places = self.block_size, self._batch.seq_lens.tolist()
            passes = [[ids[i * width : (i + 1) * width] for ids in self._passes] for i in range(len(real))]
            rows = zip(self._batch.reqs, places, anchor_token_ids.tolist(), real.tolist(), passes, strict=True)
            free = self.free()
            self._notes = [
                {"request": r.rid, "prompt": list(r.origin_input_ids), "place": p, "anchor": a, "draft": d, "passes": q}
                | {"free": free}
                for r, p, a, d, q in rows
            ]
            if mode == "own":
                return real
            self._selector_sample = None  # a drafter that is sure of itself: q is one-hot
            return torch.tensor([self.given(note) for note in self._notes], dtype=real.dtype)

        def free(self):
            batch = self._batch
            tokens = batch.token_to_kv_pool_allocator.available_size() + batch.tree_cache.evictable_size()
            return [tokens, batch.req_to_token_pool.available_size()]

        def given(self, note):
            vocab = self.model_config.vocab_size
            if mode == "random":
                return [draw.randrange(vocab) for _ in note["draft"]]
            if mode == "wrong":
                return [(token + 1) % vocab for token in note["draft"]]
            begun, place = tuple(note["prompt"]), note["place"]
            wholes = [t for t in truth if t[: len(begun)] == begun and t[place : place + 1] == (note["anchor"],)]
            # With overlap a round more is begun after a text's end.
            right = list(wholes[0][place + 1 :][: len(note["draft"])]) if wholes else []
            return right + [5] * (len(note["draft"]) - len(right))

    return Watching
