"""llama.cpp through llama-cpp-python, where it is installed: the model's own GGUF file, greedy, alone and with its
prompt lookup.

It computes in this process, by threads of an OpenMP of its own. Those sleep a few milliseconds after a turn, as torch's
do, unless OMP_WAIT_POLICY=active lets them spin for ever: that is refused.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import UserError
from ..compare_hf import Turn

BATCH = 512  # rows of a prompt in one forward: its own default


def absent(file: Path | None) -> str | None:
    """Why llama.cpp is not measured; None where it can be. `file`: the model's."""
    if find_spec("llama_cpp") is None:
        return "llama-cpp-python is not installed: pip install 'decodelab[peers]'"
    if file is None:
        return "llama.cpp reads GGUF files, and the model is none: give model.path=FILE.gguf"
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "active":
        return "with OMP_WAIT_POLICY=active its threads and torch's would spin against each other: unset it"
    return None


class _Counted:
    """Its prompt lookup, and how often it was asked: once a step."""

    def __init__(self, tokens: int) -> None:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.steps = 0
        self._lookup = LlamaPromptLookupDecoding(num_pred_tokens=tokens)

    def __call__(self, ids: Any, /, **options: Any) -> Any:
        self.steps += 1
        return self._lookup(ids, **options)


@dataclass
class LlamaPeer:
    """`plain` has logits of a forward's last row alone, `verifying` of all rows, as its speculation needs. Calls leave
    no trace."""

    plain: Any
    verifying: Any
    lookups: Mapping[str, int]
    _behind: int = field(default=-1, init=False)  # tokens of a timed forward's context, as long as they are there

    @classmethod
    def build(cls, file: Path, threads: int, context: int, lookups: Mapping[str, int]) -> "LlamaPeer":
        """Load and warm up. `context`: tokens of a prompt with its answer, at most."""
        try:
            from llama_cpp import Llama
        except (ImportError, OSError, RuntimeError) as error:  # a library that it lacks, or cannot load
            told = " ".join(str(error).split())
            raise UserError(f"llama-cpp-python cannot be loaded ({told}): peers.llama=false leaves it out") from error

        def load(logits_all: bool) -> Any:
            try:
                return Llama(
                    str(file),
                    n_ctx=context + max([0, *lookups.values()]) + 1,
                    n_batch=BATCH,
                    n_threads=threads,
                    n_threads_batch=threads,
                    n_gpu_layers=0,
                    logits_all=logits_all,
                    verbose=False,
                )
            except ValueError as error:
                raise UserError(f"llama.cpp cannot load {file} ({error}): peers.llama=false leaves it out") from error

        peer = cls(load(logits_all=False), load(logits_all=True), lookups)
        for mode in peer.modes:
            peer.generate(mode, [1, 2, 3, 4] * 4, 8)
        return peer

    @property
    def modes(self) -> dict[str, str]:
        """What can be asked for, with the settings of each."""
        said = {mode: f"LlamaPromptLookupDecoding(num_pred_tokens={tokens})" for mode, tokens in self.lookups.items()}
        return {"plain": "greedy", **said}

    def generate(self, mode: str, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int] = ()) -> Turn:
        """Greedy, up to and with the first of `eos_ids` or `max_new_tokens`."""
        drafts = _Counted(self.lookups[mode]) if mode in self.lookups else None
        model = self.plain if drafts is None else self.verifying
        model.draft_model = drafts
        model.reset()  # or it would find what it has read of this prompt
        self._behind = -1
        tokens: list[int] = []
        at: list[float] = []
        begin = time.perf_counter()
        for token in model.generate(list(prompt_ids), top_k=1, top_p=1.0, min_p=0.0, temp=0.0, repeat_penalty=1.0):
            at.append(time.perf_counter())
            tokens.append(int(token))
            if token in eos_ids or len(tokens) == max_new_tokens:
                break
        steps = len(tokens) - 1 if drafts is None else drafts.steps
        return Turn(tokens, 1, at[0] - begin, at[-1] - at[0], steps)

    def forward(self, context: int, most: int) -> Callable[[int], float]:
        """Seconds of one `eval` of k ≤ `most` rows behind `context` tokens, every row's choice on the host."""
        model = self.verifying
        ids = [i % model.n_vocab() for i in range(context + most)]

        def rows(k: int) -> float:
            if self._behind != context:
                model.reset()
                model.eval(ids[:context])
                self._behind = context
            begin = time.perf_counter()
            model.eval(ids[context : context + k])
            model.scores[context : context + k].argmax(-1).tolist()
            spent = time.perf_counter() - begin
            model.n_tokens = context  # what is behind it is dropped by the next eval
            return spent

        return rows
